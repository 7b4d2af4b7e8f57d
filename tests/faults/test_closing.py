"""close() and setup() beside other threads' calls, and what they leave behind: nothing."""

import os
import signal
import socket
import threading
import time

from mooncake.rpc.messages import Ping
from mooncake.store import MooncakeDistributedStore
from tests.faults.test_kills import timed, used
from tests.invariants.baseline import Held, settle
from tests.processes import children, wait_until

MIB = 1 << 20


def excess(before: Held, kept: int = 0) -> list[str]:
    return Held.by(os.getpid()).over(before, kept)


def test_close_beside_calls_of_other_threads(master, make_worker):
    """They get what they asked for, or a miss, or an error; a call that was on its way re-opens nothing."""
    owner = make_worker(32 * MIB)
    value = b"v" * MIB
    assert owner("result = [store.put(f's{i}', b'v' * (1 << 20)) for i in range(8)]") == [0] * 8
    before, processes = Held.by(os.getpid()), set(children(os.getpid()))
    wrong = []

    def use(store: MooncakeDistributedStore, n: int) -> None:
        try:
            for i in range(60):
                if store.get(f"s{i % 8}") not in (b"", value):
                    wrong.append("bytes")
                store.put(f"p{n}-{i}", b"x" * 10_000)
                if any(got not in (b"", value) for got in store.get_batch([f"s{j}" for j in range(8)])):
                    wrong.append("bytes of a batch")
        except BaseException as error:
            wrong.append(repr(error))

    for round_ in range(10):
        store = MooncakeDistributedStore()
        segment = 8 * MIB if round_ % 2 else 0
        assert store.setup("127.0.0.1", "P2PHANDSHAKE", segment, 16 * MIB, "tcp", "", master.address) == 0
        threads = [threading.Thread(target=use, args=(store, round_ * 10 + n)) for n in range(4)]
        for thread in threads:
            thread.start()
        time.sleep(round_ * 0.011)
        code, took = timed(store.close)
        assert code == 0
        assert took < 1.5
        for thread in threads:
            thread.join(5)
            assert not thread.is_alive()
    assert not wrong
    assert settle(lambda: excess(before, 1), 2) == []
    wait_until(lambda: set(children(os.getpid())) == processes, 3)


def test_setups_at_the_same_time(master):
    store = MooncakeDistributedStore()
    processes = set(children(os.getpid()))
    codes = []

    def join() -> None:
        codes.append(store.setup("127.0.0.1", "P2PHANDSHAKE", 8 * MIB, MIB, "tcp", "", master.address))

    threads = [threading.Thread(target=join) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert codes == [0] * 4
    assert store.put("k", b"v") == 0
    assert len(set(children(os.getpid())) - processes) == 1
    store.close()
    wait_until(lambda: set(children(os.getpid())) == processes, 3)


def test_a_setup_that_fails_late_leaves_nothing(master):
    processes = set(children(os.getpid()))
    with socket.create_server(("0.0.0.0", 0)) as taken:
        before = Held.by(os.getpid())
        for _ in range(3):
            store = MooncakeDistributedStore()
            settings = {
                "local_hostname": "127.0.0.1",
                "metadata_server": "P2PHANDSHAKE",
                "global_segment_size": MIB,
                "master_server_addr": master.address,
                "enable_client_http_server": True,
                "client_http_port": taken.getsockname()[1],
            }
            assert store.setup(settings) < 0
        assert settle(lambda: excess(before), 2) == []
    wait_until(lambda: set(children(os.getpid())) == processes, 3)
    wait_until(lambda: not master.get("/get_all_segments").split(), 3)


def test_close_hands_leases_back(master, make_store):
    store, reader = make_store(), make_store(0)
    store.put("k", b"v" * MIB)
    assert len(reader.get("k")) == MIB
    reader.close()
    assert store.remove("k", force=True) == 0
    wait_until(lambda: used(master) == 0, 1)


def test_close_with_much_outstanding_is_one_bounded_wait(master, make_store):
    store = make_store(0)
    client = store._client.rpc
    connections = [client._borrow(True) for _ in range(8)]
    master.signal(signal.SIGSTOP)
    try:
        for connection, generation in connections:
            connection.post(Ping())
            client._give_back(connection, generation)
        assert timed(store.close)[1] < 1.5
    finally:
        master.signal(signal.SIGCONT)


def test_close_while_the_master_says_nothing(master, make_worker):
    """Whatever other threads are in the middle of."""
    worker = make_worker(16 * MIB)
    worker("""
import threading
def run(n):
    for i in range(200):
        store.put(f'{n}-{i}', b'v' * 100)
threads = [threading.Thread(target=run, args=(n,)) for n in range(16)]
for thread in threads:
    thread.start()
""")
    time.sleep(0.1)
    master.signal(signal.SIGSTOP)
    try:
        start = time.monotonic()
        worker("for thread in threads: thread.join()")
        joined = time.monotonic()
        worker("store.close()")
        assert joined - start < 3
        assert time.monotonic() - joined < 3
    finally:
        master.signal(signal.SIGCONT)
