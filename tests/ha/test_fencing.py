"""Two masters at once, each sure to be the only one: the segment serves the higher term, and nobody reads or writes by
leave of the other."""

import subprocess

import numpy as np
import pytest

from mooncake.rpc.messages import PROTOCOL, Hello, Mount, SegmentInfo
from mooncake.rpc.sockets import set_time_limit
from tests.ha.switch import Switch
from tests.processes import BIN, free_port, wait_until

MIB = 1 << 20
SIZE = 200_000


class TwoMasters:
    """A segment that is mounted at the older master, and goes over to the newer one."""

    def __init__(self, make_master, cleanup) -> None:
        self.old = make_master("--default_kv_lease_ttl=3s")
        self.switch = Switch(self.old.port)
        cleanup.callback(self.switch.close)
        argv = [
            BIN / "mooncake_client", "--host=127.0.0.1", f"--port={free_port()}", "--global_segment_size=16MB",
            f"--master_server_address={self.switch.address}",
        ]  # fmt: skip
        server = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        cleanup.callback(server.wait, 10)
        cleanup.callback(server.terminate)
        wait_until(lambda: mounted(self.old), what="the segment at the old master")
        self.new = make_master("--default_kv_lease_ttl=3s")

    def go_over(self) -> None:
        self.switch.turn(self.new.port)
        wait_until(lambda: mounted(self.new), what="the segment at the new master")


def mounted(master) -> bool:
    return "OK" in [one["status"] for one in master.ask("GET", "/get_segments_detail")[1]["segments"]]


@pytest.fixture
def two(make_master, cleanup):
    return TwoMasters(make_master, cleanup)


@pytest.fixture(params=["shm", "tcp"])
def store(request, two, make_store, monkeypatch):
    """A client that knows the old master only."""
    monkeypatch.setenv("MC_FORCE_TCP", "1" if request.param == "tcp" else "0")
    return make_store(0, at=two.old)


def test_nothing_is_read_by_leave_of_the_old_one(two, store, make_store):
    """Else it might be another value by now: the new master gives out room, the old one goes on naming it."""
    assert store.put("k", b"a" * SIZE) == 0
    assert store.get("k") == b"a" * SIZE
    other = make_store(0, at=two.new)
    two.go_over()
    assert other.get("k") == b"a" * SIZE
    assert store.is_exist("k") == 1, "the old master still says so"
    assert store.get("k") == b""
    room = np.zeros(SIZE, np.uint8)
    store.register_buffer(room.ctypes.data, SIZE)
    assert store.get_into("k", room.ctypes.data, SIZE) == -707
    assert store.batch_get_into(["k"] * 2, [room.ctypes.data] * 2, [SIZE] * 2) == [-707, -707]
    assert not room.any()


def test_nothing_is_written_by_leave_of_the_old_one(two, store, make_store):
    data = np.full(SIZE, 7, np.uint8)
    store.register_buffer(data.ctypes.data, SIZE)
    start, write = store.batch_put_session_start, store.batch_put_from_multi_buffer_ranges
    assert start(["early"], [SIZE]) == [0]
    other = make_store(0, at=two.new)
    two.go_over()
    assert write(["early"], [[data.ctypes.data]], [[SIZE]], [[0]]) == [SIZE], "it gathers here first"
    assert store.batch_put_session_end(["early"]) == [-700]
    assert store.put("late", b"x" * SIZE) != 0
    assert store.is_exist("late") == 0
    assert other.is_exist("early") == other.is_exist("late") == 0
    assert other.put("late", b"y" * SIZE) == 0


def test_leases_given_before_are_honoured(two, store, make_store):
    """By the new master, who gives their room to nobody meanwhile."""
    values = {f"k{i}": bytes([65 + i]) * SIZE for i in range(5)}
    for key, value in values.items():
        assert store.put(key, value) == 0
    other = make_store(0, at=two.new)
    assert store.batch_get_session_start(list(values)) == [0] * 5
    two.go_over()
    wait_until(lambda: other.is_exist("k0") == 1, what="the values at the new master")
    other.remove_all(force=True)
    fresh = [other.put(f"n{i}", bytes(SIZE)) for i in range(78)]
    assert 0 in fresh
    room = np.zeros(SIZE, np.uint8)
    store.register_buffer(room.ctypes.data, SIZE)
    for key, value in values.items():
        assert store.batch_get_into_multi_buffer_ranges([key], [[room.ctypes.data]], [[SIZE]], [[0]]) == [SIZE]
        assert room.tobytes() == value


def test_a_segment_serves_no_older_master_again(two, make_store):
    """It says so, and goes on looking; a master that stands alone takes a higher term then."""
    two.go_over()
    before = term(two.new)
    assert term(two.old) < before
    two.switch.turn(two.old.port)
    wait_until(lambda: term(two.old) > before, what="a higher term of the old master")
    store = make_store(0, at=two.old)
    wait_until(lambda: store.put("k", b"v") == 0, what="the segment at the old master again")
    assert store.get("k") == b"v"


def term(master) -> int:
    from mooncake.rpc.client import Connection
    from mooncake.rpc.sockets import connect

    connection = Connection(connect("127.0.0.1", master.port, 1.0))
    try:
        return connection.greet(Hello(PROTOCOL, "test", "client", "1-1", "here")).term
    finally:
        connection.close()


@pytest.mark.slow
def test_a_leader_that_hears_of_a_later_term_leads_no_longer(make_backend, make_pool):
    """Whatever the back end says: it may have lost its memory.  The next term is above."""
    from mooncake.errors import StoreError
    from mooncake.rpc.client import Connection
    from mooncake.rpc.sockets import connect

    pool = make_pool(make_backend("redis"), 1)
    (master,) = pool.masters
    later = term(master) + 10**9
    connection = Connection(connect("127.0.0.1", master.port, 1.0))
    set_time_limit(connection.sock, 2.0)
    connection.greet(Hello(PROTOCOL, "test", "segment", "1-2", "here"))
    info = SegmentInfo(5, "h:1", MIB, "127.0.0.1:1", "@none", "here", "1-2", "tcp", "")
    with pytest.raises(StoreError, match="leads no longer"):
        connection.call(Mount(info, later, 1000))
    connection.close()
    wait_until(lambda: pool.leaders() and term(master) > later, 15, "a term above")
    assert "was served under the later term" in pool.log(master)
