"""An engine that crashes or restarts finds its segment server, and the values in it, again."""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mooncake.rpc import frame, messages
from mooncake.rpc.segment_messages import LingerQuery, TakeOver
from mooncake.store import MooncakeDistributedStore
from mooncake.transfer.warm_sockets import connect, waiting
from tests.processes import BIN, Worker, children, free_port, gone, stop, wait_until
from tests.warm.conftest import MIB, SEGMENT

pytestmark = pytest.mark.usefixtures("linger", "ended")

PUT = "result = store.put_batch([f'k{i}' for i in range(n)], [bytes([i]) * 100_000 for i in range(n)])"
GET = "result = [store.get(f'k{i}') == bytes([i]) * 100_000 for i in range(n)]"
N = 100


def server_of(worker) -> int:
    return worker("result = store._client._session.server.pid")


def is_waiting() -> bool:
    return len(waiting("")) == 1


def capacity(master) -> float:
    return master.metric("master_total_capacity_bytes")


@pytest.mark.parametrize("end", ["kill", "close"])
def test_values_are_hits_at_once(master, make_worker, end):
    """Whether the engine crashed or closed its store; no second segment, and the name is the same."""
    engine = make_worker(SEGMENT)
    assert engine(PUT, n=N) == 0
    pid, name = server_of(engine), engine("result = store.get_hostname()")
    if end == "kill":
        engine.kill()
    else:
        engine("store.close()")
    wait_until(is_waiting, what="the lingering server")
    again = make_worker(SEGMENT)
    assert again(GET, n=N) == [True] * N
    assert server_of(again) == pid
    assert again("result = store.get_hostname()") == name
    assert waiting("") == []
    assert capacity(master) == SEGMENT
    assert again(PUT.replace("'k", "'more"), n=N) == 0
    assert again("result = store.transfer_stats()['local']") == 2 * N * 100_000


@pytest.mark.slow
def test_again_and_again(master, make_worker):
    """Each life of the engine adds values; descriptors and threads of the server stay as many."""
    counts = []
    pid = 0
    for life in range(5):
        engine = make_worker(SEGMENT)
        assert engine(f"result = store.put('life{life}', bytes(1000))") == 0
        assert engine(f"result = store.batch_is_exist([f'life{{i}}' for i in range({life + 1})])") == [1] * (life + 1)
        pid = pid or server_of(engine)
        assert server_of(engine) == pid
        engine.kill()
        wait_until(is_waiting, what="the lingering server")
        time.sleep(0.1)
        counts.append((len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task"))))
    assert counts[-1] == counts[1]


@pytest.mark.slow
def test_its_time_is_over(master, make_worker, linger):
    linger(1)
    engine = make_worker(SEGMENT)
    assert engine(PUT, n=N) == 0
    pid = server_of(engine)
    engine.kill()
    wait_until(is_waiting, what="the lingering server")
    assert capacity(master) == SEGMENT
    wait_until(lambda: gone(pid), 10, "the server's end")
    assert waiting("") == []
    wait_until(lambda: capacity(master) == 0, what="the unmount")
    assert make_worker(SEGMENT)("result = store.is_exist('k0')") == 0


def test_without_the_setting_it_ends_with_its_engine(master, make_worker, linger):
    linger(0)
    engine = make_worker(SEGMENT)
    pid = server_of(engine)
    engine.kill()
    wait_until(lambda: gone(pid), 5, "the server's end")
    assert waiting("") == []


def test_ended_by_command(master, make_worker):
    engine = make_worker(SEGMENT)
    name, pid = engine("result = store.get_hostname()"), server_of(engine)
    engine.kill()
    wait_until(is_waiting, what="the lingering server")

    def warm(*arguments: str) -> subprocess.CompletedProcess:
        return subprocess.run([BIN / "mooncake", "warm", *arguments], capture_output=True, text=True, check=False)

    listed = warm()
    assert listed.returncode == 0
    assert listed.stdout.splitlines()[1].split()[:2] == [name, "48"]
    assert listed.stdout.split()[-1] == str(pid)
    wrong = warm("--end", "nobody:1")
    assert wrong.returncode == 1
    assert "'nobody:1'" in wrong.stderr
    assert warm("--end", name).stdout == f"{name}: ended\n"
    wait_until(lambda: gone(pid), 5, "the server's end")
    assert warm().stdout == "no segment server waits here\n"
    assert capacity(master) == 0


@pytest.mark.slow
def test_two_engines_one_server(master, make_worker, cleanup):
    """One gets it, the other starts its own; all of several that wait are used, each once."""
    for servers, engines in ((1, 2), (2, 3)):
        first = [make_worker(SEGMENT) for _ in range(servers)]
        pids = {server_of(engine) for engine in first}
        for engine in first:
            engine.kill()
        wait_until(lambda n=servers: len(waiting("")) == n, what="the lingering servers")
        racers = [Worker() for _ in range(engines)]
        for racer in racers:
            cleanup.callback(racer.close)
            racer("from mooncake.store import MooncakeDistributedStore\nimport mooncake.client.client")
        for racer in racers:
            racer.send(
                "store = MooncakeDistributedStore()\n"
                "result = store.setup('127.0.0.1', 'P2PHANDSHAKE', segment, 1 << 20, 'tcp', '', master)",
                segment=SEGMENT,
                master=master.address,
            )
        assert [racer.receive() for racer in racers] == [0] * engines
        got = [server_of(racer) for racer in racers]
        assert len(set(got)) == engines
        assert pids < set(got)
        assert capacity(master) == engines * SEGMENT
        for racer in racers:
            racer.close()
        subprocess.run([BIN / "mooncake", "warm", "--end", "all"], check=True, stdout=subprocess.DEVNULL)
        wait_until(lambda: capacity(master) == 0, what="the unmounts")


@pytest.mark.slow
@pytest.mark.parametrize("what", ["size", "host", "protocol"])
def test_other_settings_are_another_server(master, make_worker, cleanup, what):
    engine = make_worker(SEGMENT)
    pid = server_of(engine)
    engine.kill()
    wait_until(is_waiting, what="the lingering server")
    other = Worker()
    cleanup.callback(other.close)
    code = other(
        "from mooncake.store import MooncakeDistributedStore\nstore = MooncakeDistributedStore()\n"
        "result = store.setup(host, 'P2PHANDSHAKE', segment, 1 << 20, protocol, '', master)",
        host="localhost" if what == "host" else "127.0.0.1",
        segment=SEGMENT + (MIB if what == "size" else 0),
        protocol="shm" if what == "protocol" else "tcp",
        master=master.address,
    )
    assert code == 0
    assert server_of(other) != pid
    assert is_waiting()


def test_another_user_cannot_take_it_over(master, make_worker):
    """Nor end it, nor learn anything."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to become somebody else")
    engine = make_worker(SEGMENT)
    pid = server_of(engine)
    engine.kill()
    wait_until(is_waiting, what="the lingering server")
    [address] = waiting("")
    program = """
import json, os, socket, sys
os.setgid(65534), os.setuid(65534)
sock = socket.socket(socket.AF_UNIX)
sock.connect("\\0" + sys.argv[1])
sock.settimeout(5)
try:
    sock.sendall(b"x" * 40)
    print(json.dumps(len(sock.recv(100))))
except OSError:
    print(0)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, address[1:]], capture_output=True, text=True, check=True, timeout=20
    )
    assert json.loads(done.stdout) == 0
    assert is_waiting()
    assert server_of(make_worker(SEGMENT)) == pid


@pytest.mark.slow
def test_an_impostor_is_not_believed(master, make_worker, cleanup, monkeypatch):
    """A socket of that name that is another user's, or says nothing: the engine starts a server of its own."""
    engine = make_worker(SEGMENT)
    engine.kill()
    wait_until(is_waiting, what="the lingering server")
    [address] = waiting("")
    subprocess.run([BIN / "mooncake", "warm", "--end", "all"], check=True, stdout=subprocess.DEVNULL)
    wait_until(lambda: waiting("") == [])
    silent = socket.socket(socket.AF_UNIX)
    cleanup.callback(silent.close)
    silent.bind(address)
    silent.listen()
    began = time.monotonic()
    again = make_worker(SEGMENT)
    assert time.monotonic() - began < 15
    assert again("result = store.put('k', b'v') or store.get('k') != b'v'") is False
    silent.close()


def test_the_secret_is_asked_for(make_master, make_worker, monkeypatch):
    monkeypatch.setenv("MOONCAKE_AUTH_TOKEN", "a-secret-that-is-long-enough")
    master = make_master()
    engine = make_worker(SEGMENT, at=master)
    assert engine(PUT, n=N) == 0
    pid = server_of(engine)
    engine.kill()
    wait_until(is_waiting, what="the lingering server")
    monkeypatch.setenv("MOONCAKE_AUTH_TOKEN", "another-secret-that-is-long")
    stranger = subprocess.run([BIN / "mooncake", "warm", "--end", "all"], capture_output=True, text=True, check=False)
    assert stranger.returncode == 1
    assert "differ" in stranger.stderr
    monkeypatch.setenv("MOONCAKE_AUTH_TOKEN", "a-secret-that-is-long-enough")
    again = make_worker(SEGMENT, at=master)
    assert server_of(again) == pid
    assert again(GET, n=N) == [True] * N
    again.kill()
    wait_until(is_waiting, what="the lingering server")


def test_a_put_in_flight_when_it_was_killed(master, make_worker):
    """Its room comes back, its key can be put again, and values of others stay."""
    engine = make_worker(SEGMENT)
    assert engine(PUT, n=10) == 0
    assert engine("result = store.batch_put_session_start(['open'], [20 << 20])") == [0]
    engine.send("import threading\nbig = bytes(8 << 20)\nwhile True:\n    store.upsert('busy', big)\n")
    time.sleep(0.3)
    engine.kill()
    wait_until(is_waiting, what="the lingering server")
    again = make_worker(SEGMENT)
    assert again(GET, n=10) == [True] * 10
    assert again("result = store.get('busy') in (b'', bytes(8 << 20))")
    assert again("result = store.is_exist('open')") == 0
    wait_until(lambda: again("result = store.batch_put_session_start(['open'], [20 << 20])") == [0], 5, "the key")
    assert again("result = store.batch_put_session_revoke(['open'])") == [0]
    assert again("result = store.remove_all(force=True) >= 11")
    wait_until(lambda: master.metric("master_allocated_bytes") == 0, 10, "all room")


@pytest.mark.slow
def test_leases_from_before_are_honoured(make_master, make_worker, make_store):
    """A reader elsewhere, with a lease from before the crash, gets its bytes though the value is overwritten after."""
    master = make_master("--default_kv_lease_ttl=3000")
    engine = make_worker(SEGMENT, at=master)
    assert engine("result = store.put('v', b'1' * (30 << 20))") == 0
    reader = make_worker(0, at=master)
    assert reader("result = store.batch_get_session_start(['v'])") == [0]
    engine.kill()
    wait_until(is_waiting, what="the lingering server")
    again = make_worker(SEGMENT, at=master)
    assert again("result = store.remove('v', force=True)") == 0
    assert again("result = store.put('w', b'2' * (30 << 20))") in (0, -200)
    read = reader(
        "import ctypes\nroom = ctypes.create_string_buffer(30 << 20)\n"
        "code = store.batch_get_into_multi_buffer_ranges("
        "['v'], [[ctypes.addressof(room)]], [[30 << 20]], [[0]])[0]\n"
        "result = [code, room.raw == b'1' * (30 << 20)]"
    )
    assert read in ([30 << 20, True], [-707, True], [-707, False])


def test_a_new_master_finds_it(master, make_worker):
    """The master is killed while nobody has the server."""
    engine = make_worker(SEGMENT)
    assert engine(PUT, n=N) == 0
    engine.kill()
    wait_until(is_waiting, what="the lingering server")
    master.kill()
    master.start()
    wait_until(lambda: capacity(master) == SEGMENT, 20, "the mount")
    again = make_worker(SEGMENT)
    wait_until(lambda: again(GET, n=N) == [True] * N, 10, "the values")


@pytest.mark.slow
def test_a_stopped_server_is_left_alone(master, make_worker):
    """It costs one bounded wait; and when it goes on, it is nobody's."""
    engine = make_worker(SEGMENT)
    pid = server_of(engine)
    engine.kill()
    wait_until(is_waiting, what="the lingering server")
    stop(pid)
    again = make_worker(SEGMENT)
    assert server_of(again) != pid
    os.kill(pid, signal.SIGCONT)
    time.sleep(0.5)
    assert is_waiting() or gone(pid)


def test_who_reads_what_the_engine_wrote_sees_its_end(master):
    """A server that stays holds neither standard output nor standard error."""
    program = """
import os, signal, sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert store.setup("127.0.0.1", "P2PHANDSHAKE", 16 << 20, 1 << 20, "tcp", "", sys.argv[1]) == 0
print("up", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, master.address], capture_output=True, text=True, timeout=20, check=False
    )
    assert done.returncode == -signal.SIGKILL
    assert done.stdout == "up\n"
    wait_until(is_waiting, what="the lingering server")


def test_a_store_that_is_set_up_again_in_one_process(master):
    store = MooncakeDistributedStore()
    pids = set()
    for life in range(3):
        assert store.setup("127.0.0.1", "P2PHANDSHAKE", SEGMENT, MIB, "tcp", "", master.address) == 0
        pids.add(store._client._session.server.pid)
        assert [store.is_exist(f"life{n}") for n in range(life)] == [1] * life
        assert store.put(f"life{life}", b"x") == 0
        store.close()
    assert len(pids) == 1
    assert set(children(os.getpid())) >= pids


def test_a_wrong_number_is_refused(master, monkeypatch, caplog):
    store = MooncakeDistributedStore()
    for wrong in ("soon", "-1", "99999999"):
        monkeypatch.setenv("MOONCAKE_SEGMENT_LINGER_S", wrong)
        assert store.setup("127.0.0.1", "P2PHANDSHAKE", SEGMENT, MIB, "tcp", "", master.address) == -1
        assert "MOONCAKE_SEGMENT_LINGER_S" in caplog.text
        caplog.clear()


@pytest.mark.slow
def test_sockets_in_a_directory(master, make_worker, monkeypatch, tmp_path):
    monkeypatch.setenv("MC_SHM_SOCKET_DIR", str(tmp_path))
    engine = make_worker(SEGMENT)
    assert engine(PUT, n=N) == 0
    pid = server_of(engine)
    engine.kill()
    wait_until(lambda: len(waiting(str(tmp_path))) == 1, what="the lingering server")
    [address] = waiting(str(tmp_path))
    assert Path(address).stat().st_mode & 0o777 == 0o600
    again = make_worker(SEGMENT)
    assert server_of(again) == pid
    assert again(GET, n=N) == [True] * N
    assert waiting(str(tmp_path)) == []
    again.kill()
    wait_until(lambda: len(waiting(str(tmp_path))) == 1, what="the lingering server")
    os.kill(pid, signal.SIGKILL)  # its socket stays in the directory
    wait_until(lambda: gone(pid))
    last = make_worker(SEGMENT)
    assert server_of(last) != pid
    assert waiting(str(tmp_path)) == []
    last("import os; store._client._session.server.kill()")


def test_mooncake_client_outlives_engines(master, make_worker, cleanup):
    """Without any setting: engines that crash find their values on the node's server."""
    port = free_port()
    node = subprocess.Popen(
        [BIN / "mooncake_client", "--host=127.0.0.1", f"--port={port}", f"--master_server_address={master.address}",
         "--global_segment_size=64MB"],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    cleanup.callback(node.wait)
    cleanup.callback(node.terminate)
    wait_until(lambda: capacity(master) == 64 * MIB, 20, "the node's segment")
    for life in range(2):
        engine = make_worker(0)
        if not life:
            assert engine(PUT, n=N) == 0
        assert engine(GET, n=N) == [True] * N
        engine.kill()
    assert waiting("") == []


def test_garbage_on_its_socket(master, make_worker):
    """Random bytes, messages of other ports, a file instead of an engine, and more visitors than it takes."""
    engine = make_worker(SEGMENT)
    assert engine(PUT, n=N) == 0
    pid = server_of(engine)
    engine.kill()
    wait_until(is_waiting, what="the lingering server")
    [address] = waiting("")
    time.sleep(1)  # it is mounted as another client, and the old connection closed
    before = len(os.listdir(f"/proc/{pid}/fd"))
    dice = random.Random(5)
    hello = messages.Hello(messages.PROTOCOL, "x", "client", "1-1", "h")
    kinds = [hello, messages.Ping(), TakeOver("", 1), TakeOver("x" * 3000, -1), messages.Unmount([1]), LingerQuery()]
    crowd = []
    file = open(os.devnull)  # noqa: SIM115
    for turn in range(200):
        visitor = connect(address)
        crowd.append(visitor)
        data = b"".join(frame.pack(messages.KINDS[type(m)], 0, 1, messages.encode(m)) for m in dice.choices(kinds, k=2))
        if turn % 2:
            data = dice.randbytes(dice.randrange(1, 400))
        with contextlib.suppress(OSError):
            if turn % 5:
                visitor.sendall(data)
            else:
                socket.send_fds(visitor, [data], [file.fileno()] * dice.randrange(1, 4))
    for visitor in (*crowd, file):
        visitor.close()
    wait_until(lambda: len(os.listdir(f"/proc/{pid}/fd")) == before, what="all visitors' end")
    again = make_worker(SEGMENT)
    assert server_of(again) == pid
    assert again(GET, n=N) == [True] * N


def test_a_file_is_no_engine(master, make_worker, tmp_path):
    """Whoever sends something that nobody can watch does not get the server, and the next one does."""
    engine = make_worker(SEGMENT)
    pid, identity = server_of(engine), engine("result = store._client._session._identity(48 << 20)")
    engine.kill()
    wait_until(is_waiting, what="the lingering server")
    [address] = waiting("")
    with connect(address) as visitor, open(tmp_path / "file", "w") as file:
        request = frame.pack(messages.KINDS[TakeOver], 0, 1, messages.encode(TakeOver(identity, 1000)))
        socket.send_fds(visitor, [request], [file.fileno(), file.fileno()])
        visitor.settimeout(5)
        assert visitor.recv(100) == b""
    assert is_waiting()
    assert server_of(make_worker(SEGMENT)) == pid
