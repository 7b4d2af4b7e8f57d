"""Segments in files that users name, and grace periods."""

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from mooncake.store import MooncakeDistributedStore
from tests.processes import children, stop, wait_until

MIB = 1 << 20
MARK = 256  # bytes at its end that the segment keeps to itself
REFUSED = {"ret": -600, "segment_ids": []}


@pytest.fixture
def file(request, tmp_path):
    """A file of 48 MiB of ones, in shared memory if its parameter does not say "disk"."""
    directory = tmp_path if getattr(request, "param", "") == "disk" else "/dev/shm"
    path = f"{directory}/mooncake-test-{os.getpid()}"
    with open(path, "wb") as f:
        f.write(b"\1" * (48 * MIB))
    yield path
    os.unlink(path)


def mount(store, file, size=32 * MIB, offset=MIB) -> list[str]:
    mounted = store.mount_segment(file, size, offset)
    assert mounted == {"ret": 0, "segment_ids": mounted["segment_ids"]}
    return mounted["segment_ids"]


@pytest.mark.parametrize("file", ["shared memory", "disk"], indirect=True)
def test_values_lie_in_the_file(master, make_store, make_worker, file):
    store = make_store(segment=0)
    segments = mount(store, file)
    assert master.metric("master_total_capacity_bytes") == 32 * MIB - MARK
    values = {f"k{i}": os.urandom(MIB + i) for i in range(20)}
    for key, value in values.items():
        assert store.put(key, value) == 0
    assert store.get_batch(list(values)) == list(values.values())

    ragged = np.frombuffer(b"".join(values.values()), np.uint8)
    address = ragged.ctypes.data
    assert store.batch_put_from_multi_buffers(["m"], [[address + 5, address]], [[100_001, 4096]]) == [0]
    room = np.zeros(104_097, np.uint8)
    assert store.register_buffer(room.ctypes.data, room.size) == 0
    pieces = [[room.ctypes.data, room.ctypes.data + 7]], [[7, 104_090]]
    assert store.batch_get_into_multi_buffers(["m"], *pieces) == [104_097]
    assert room.tobytes() == ragged[5:100_006].tobytes() + ragged[:4096].tobytes()
    assert store.get_into("m", 1 << 40, 104_097) == -800, "no memory of ours: an error, and no crash"
    store.unregister_buffer(room.ctypes.data)

    for environment, transport in (({}, "shm"), ({"MC_FORCE_TCP": "1"}, "tcp")):
        other = make_worker(env=environment)
        assert other("result = [store.get(k) == bytes.fromhex(v) for k, v in values.items()]",
                     values={key: values[key].hex() for key in ("k0", "k19")}) == [True, True]  # fmt: skip
        assert other("result = store.put('theirs', b't' * 3_000_000)") in (0,)
        assert other("result = store.transfer_stats()")[transport] > 2 * MIB
        assert store.get("theirs") == b"t" * 3_000_000
    assert store.unmount_segment(segments) == 0
    assert store.unmount_segment(segments) == -1
    wait_until(lambda: store.batch_is_exist(["k0", "m"]) == [0, 0], what="the end of what was there")
    held = [os.readlink(fd) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()]
    assert not [name for name in held if file in name or "mooncake-table" in name]
    content = Path(file).read_bytes()
    assert len(content) == 48 * MIB
    assert content[:MIB] == b"\1" * MIB
    assert content[33 * MIB :] == b"\1" * (15 * MIB)
    assert values["k0"] in content


def test_files_that_cannot_be_used(make_store, tmp_path):
    store = make_store(segment=16 * MIB)
    small = tmp_path / "small"
    small.write_bytes(bytes(MIB))
    link = tmp_path / "link"
    link.symlink_to("nowhere")
    for arguments in (
        ("", 1), ("small", 1), (tmp_path, MIB), ("/dev/null", 1), (link, 1), (tmp_path / "none", 1), (small, 0),
        (small, MIB + 1), (small, MIB, 1), (small, 1 << 60, 1 << 60), (f"{small}\0", 1),
    ):  # fmt: skip
        assert store.mount_segment(*arguments) == REFUSED, arguments
    for arguments in ((small, -1), (small, "1"), (small, 1, -1), (small, True)):
        with pytest.raises(TypeError):
            store.mount_segment(*arguments)
    assert MooncakeDistributedStore().mount_segment(str(small), MIB) == {"ret": -1, "segment_ids": []}
    assert small.read_bytes() == bytes(MIB)


def test_no_two_segments_share_bytes(make_store, make_worker, file):
    store, other = make_store(segment=0), make_worker()
    segments = mount(store, file, 16 * MIB, 0)
    assert store.mount_segment(file, MIB, 16 * MIB - 1) == {"ret": -1, "segment_ids": []}
    assert store.put("k", b"v") == 0
    more = mount(store, file, 16 * MIB, 16 * MIB)
    take = "result = store.mount_segment(file, 16 << 20, 0)['ret']"
    assert other(take, file=file) == -1
    other("store.get('k')")  # it has the descriptor now, and lets go of it by itself
    stop(other.pid)  # perhaps in the middle of a copy
    assert store.unmount_segment([*segments, *more]) == 0
    assert store.mount_segment(file, 16 * MIB) == {"ret": -1, "segment_ids": []}
    other.signal(signal.SIGCONT)
    assert other(take, file=file) == 0


def test_a_file_that_is_cut_short(master, make_store, file):
    """Errors, and never other bytes; then the segment leaves by itself."""
    store = make_store(segment=0)
    segments = mount(store, file)
    assert store.put("k", b"v" * (20 * MIB)) == 0
    os.truncate(file, 2 * MIB)
    assert store.get("k") == b""
    assert store.put("new", b"v") in (-800, -200)
    wait_until(lambda: not master.get("/get_all_segments").split(), what="the segment's leave")
    assert store.get_size("k") == -704
    assert store.unmount_segment(segments) == 0
    assert os.path.getsize(file) == 2 * MIB


@pytest.mark.parametrize(("forced", "left"), [("", 33 * MIB - 1), ("", 2 * MIB + 77), ("1", MIB + 100)])
def test_a_file_that_is_cut_and_made_long_again(master, make_store, make_worker, file, forced, left):
    """At once, so that nobody has looked at it meanwhile: no value is read as zeros, be it large or small."""
    store, other = make_store(segment=0), make_worker(env={"MC_FORCE_TCP": forced})
    mount(store, file)
    values = {f"small{i}": os.urandom(200) for i in range(40)} | {f"large{i}": os.urandom(MIB) for i in range(8)}
    for key, value in values.items():
        assert store.put(key, value) == 0
    sizes = [len(value) for value in values.values()]
    assert other("result = [len(value) for value in store.get_batch(keys)]", keys=list(values)) == sizes
    os.truncate(file, left)
    os.truncate(file, 48 * MIB)
    assert other("result = [len(value) for value in store.get_batch(keys)]", keys=list(values)) == [0] * len(values)
    assert store.get_batch(list(values)) == [b""] * len(values)
    assert store.put("new", b"v") in (-800, -200)
    wait_until(lambda: not master.get("/get_all_segments").split(), what="the segment's leave")
    assert store.get_size("small1") == -704


def test_it_ends_with_its_process(master, make_worker, file):
    worker = make_worker()
    assert worker("result = store.mount_segment(file, 16 << 20)['ret']", file=file) == 0
    (server,) = children(worker.pid)
    worker.kill()
    wait_until(lambda: master.metric("master_total_capacity_bytes") == 0, limit=15, what="the end of the segment")
    wait_until(lambda: not os.path.exists(f"/proc/{server}"), what="the end of its server")


def test_grace_period(master, make_store, make_worker, file):
    store, other = make_store(segment=0), make_worker(env={"MC_FORCE_TCP": "1"})
    segments = mount(store, file, 16 * MIB, 0)
    assert store.put("k", b"v" * MIB) == 0
    started = time.monotonic()
    assert store.unmount_segment(segments, 2) == 0
    assert store.unmount_segment(segments, 2) == -1
    assert time.monotonic() - started < 1.9, "it does not wait"
    assert store.put("new", b"v") == -200
    assert other("result = len(store.get('k'))") == MIB
    wait_until(lambda: store.get("k") == b"", what="its end")
    assert 1.9 < time.monotonic() - started < 6
    assert master.metric("master_total_capacity_bytes") == 0


def test_a_retired_segment_stays_so_under_a_new_master(master, make_store):
    store = make_store(segment=0)
    segments = store.allocate_and_mount_segment(16 * MIB)["segment_ids"]
    assert store.put("k", b"v") == 0
    assert store.unmount_and_free_segment(segments, 60) == 0
    master.signal(signal.SIGKILL)
    master.process.wait()
    master.start()
    wait_until(lambda: store.get("k") == b"v", what="the value under the new master")
    wait_until(lambda: store.put(f"new-{time.monotonic()}", b"v") == -200, what="the new master's knowledge of it")
    started = time.monotonic()
    store.close()
    assert time.monotonic() - started < 2, "close does not wait for grace periods"
    wait_until(lambda: not master.get("/get_all_segments").split(), what="the end of the segment")


def test_a_store_that_is_not_set_up():
    fresh = MooncakeDistributedStore()
    assert fresh.unmount_segment(["1-2"]) == -1
    assert fresh.unmount_local_disk_segment() == -600
    assert fresh.get_offload_rpc_read_count() == 0
    with pytest.raises(TypeError):
        fresh.unmount_local_disk_segment(-1)
