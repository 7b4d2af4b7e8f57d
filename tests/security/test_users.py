"""Another user of a host gets no segment's memory, though he reaches the same network and the same abstract sockets."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import children
from tests.wire import greeted, segments

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")

MIB = 1 << 20
ANOTHER = 65534

_TRY = """
import os, socket, sys
os.setgroups([])
os.setresgid({uid}, {uid}, {uid})
os.setresuid({uid}, {uid}, {uid})
name, pid, request = sys.argv[1], int(sys.argv[2]), bytes.fromhex(sys.argv[3])
link = socket.socket(socket.AF_UNIX)
link.settimeout(5)
link.connect("\\0" + name[1:] if name.startswith("@") else name)
try:
    link.sendall(request)
    data, descriptors, _, _ = socket.recv_fds(link, 4096, 4)
except ConnectionError:
    data, descriptors = b"", []
print(len(data), len(descriptors))
for place in (f"/proc/{{pid}}/fd", f"/proc/{{pid}}/mem", f"/proc/{{pid}}/map_files"):
    try:
        os.listdir(place) if place.endswith(("fd", "files")) else open(place, "rb").close()
    except PermissionError:
        print("refused")
    else:
        print("open", place)
"""


@pytest.mark.parametrize("uid", [0, ANOTHER], ids=["same", "other"])
def test_only_the_same_user_is_handed_the_memory(master, make_worker, uid):
    from mooncake.rpc import frame
    from mooncake.rpc.data_messages import Attach
    from mooncake.rpc.messages import KINDS, encode

    owner = make_worker(16 * MIB)
    assert owner("result = store.put('k', b'v' * 1000)") == 0
    (server,) = children(owner.pid)
    friend = greeted(master.port)
    (info,) = segments(friend, "k")
    friend.close()
    request = frame.pack(KINDS[Attach], frame.REQUEST, 1, encode(Attach(info.segment)))
    done = subprocess.run(
        [sys.executable, "-c", _TRY.format(uid=uid), info.unix, str(server), request.hex()],
        capture_output=True, text=True, timeout=30, check=False, cwd="/",
    )  # fmt: skip
    lines = done.stdout.split("\n")
    if uid:
        assert lines[0] == "0 0", done.stderr
        assert lines[1:4] == ["refused"] * 3
    else:
        assert lines[0].endswith(" 2"), done.stderr
    assert owner("result = store.get('k') == b'v' * 1000")


def test_no_file_of_a_segment_is_open_to_others(master, make_worker):
    """Its memory has no name; what has one, such as a socket in a folder, belongs to the user alone."""
    owner = make_worker(16 * MIB)
    (server,) = children(owner.pid)
    for entry in os.listdir(f"/proc/{server}/fd"):
        try:
            target = os.readlink(f"/proc/{server}/fd/{entry}")
        except OSError:
            continue
        path = Path(target)
        if target.startswith("/") and path.exists() and path.is_file() and os.access(path, os.W_OK):
            assert not path.stat().st_mode & 0o002, target
