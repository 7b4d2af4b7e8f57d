"""An indexer that missed events of a master is exact again: from what the master kept, or as all is told anew."""

import os
import random
import signal

import pytest
import zmq

from tests.events.indexer import Conductor
from tests.processes import free_port, wait_until

MIB = 1 << 20
MANY = 70_000  # more than the messages that are kept can tell of


@pytest.fixture
def conductor(cleanup):
    made = Conductor()
    cleanup.callback(made.stop)
    return made


def blocks_of(conductor: Conductor) -> int:
    return conductor.instance("pool")["blocks"]


def holds(conductor: Conductor, number: int) -> bool:
    """Whether the indexer lists the value whose key is `number`."""
    status, answer = conductor.post("/query_by_hash", seq_hashes=[number])
    assert status == 200, answer
    return bool(answer["default"]["pool"]["CPU"])


def put_many(store, numbers) -> None:
    keys = [str(number) for number in numbers]
    for at in range(0, len(keys), 1000):
        some = keys[at : at + 1000]
        assert store.put_batch(some, [b"x"] * len(some)) == 0


def follow(conductor: Conductor, endpoint: str, replay: str) -> None:
    status, answer = conductor.post(
        "/register", endpoint=endpoint, replay_endpoint=replay, instance_id="pool", block_size=4
    )
    assert status == 200, answer
    wait_until(lambda: conductor.instance("pool")["connected"], 10, "the subscription")


def test_one_that_comes_late_gets_what_was_kept(conductor, make_replaying, make_store):
    master, endpoint, replay = make_replaying()
    store = make_store(at=master)
    put_many(store, range(100))
    assert store.remove("7", force=True) == 0
    follow(conductor, endpoint, replay)
    wait_until(lambda: blocks_of(conductor) == 99, 10, "what was put before")
    assert not holds(conductor, 7)
    assert holds(conductor, 8)
    assert master.metric("mooncake_kv_events_retold_total") == 0


def test_one_that_comes_later_is_told_everything(conductor, make_replaying, make_store):
    master, endpoint, replay = make_replaying()
    store = make_store(segment=64 * MIB, at=master)
    put_many(store, range(MANY))
    for number in range(0, MANY, 7000):
        assert store.remove(str(number), force=True) == 0
    follow(conductor, endpoint, replay)
    wait_until(lambda: blocks_of(conductor) == MANY - 10, 30, "all that is there")
    assert master.metric("mooncake_kv_events_retold_total") == 1
    assert store.remove("1", force=True) == 0
    wait_until(lambda: blocks_of(conductor) == MANY - 11, 10, "a removal after that")


@pytest.mark.slow
def test_an_indexer_that_stood_still_is_exact_again(conductor, make_replaying, make_store):
    """While it does not read, more is told than anybody keeps; values come and go also while all is told anew."""
    master, endpoint, replay = make_replaying("--kv_events_queue_capacity=5000")
    store = make_store(segment=64 * MIB, at=master)
    put_many(store, range(1000))
    follow(conductor, endpoint, replay)
    wait_until(lambda: blocks_of(conductor) == 1000, 10, "the first values")
    rng = random.Random(1)
    there = set(range(1000))
    os.kill(conductor.process.pid, signal.SIGSTOP)
    try:
        put_many(store, range(1000, MANY))
        there |= set(range(1000, MANY))
    finally:
        os.kill(conductor.process.pid, signal.SIGCONT)
    for number in rng.sample(range(MANY), 3000):
        store.remove(str(number), force=True)
        there.discard(number)
    wait_until(lambda: blocks_of(conductor) == len(there), 60, "what is there")
    for number in rng.sample(range(MANY), 100):
        assert holds(conductor, number) == (number in there)


def test_events_that_the_master_lost_are_made_good(conductor, make_replaying, make_store):
    master, endpoint, replay = make_replaying("--kv_events_queue_capacity=100")
    store = make_store(segment=64 * MIB, at=master)
    follow(conductor, endpoint, replay)
    put_many(store, range(5000))
    assert master.metric("mooncake_kv_events_dropped_total") > 0
    wait_until(lambda: blocks_of(conductor) == 5000, 30, "all values")


def test_a_new_master_is_followed_exactly(conductor, make_replaying, make_store):
    master, endpoint, replay = make_replaying()
    store = make_store(at=master)
    put_many(store, range(500))
    follow(conductor, endpoint, replay)
    wait_until(lambda: blocks_of(conductor) == 500, 10, "the first values")
    os.kill(conductor.process.pid, signal.SIGSTOP)
    try:
        master.kill()
        master.start()
        wait_until(lambda: master.metric("master_key_count") == 500, 15, "the values")
        assert store.batch_remove([str(number) for number in range(100)], force=True) == [0] * 100
    finally:
        os.kill(conductor.process.pid, signal.SIGCONT)
    wait_until(lambda: blocks_of(conductor) == 400, 20, "what is left")


def test_garbage_at_the_replay_socket(make_replaying, make_store):
    master, _, replay = make_replaying()
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.connect(replay)
    try:
        for frames in ([b""], [b"", b"1"], [b"", b"x" * 100_000], [b"", b"", b"", b"12345678", b""], [b"x"] * 50):
            socket.send_multipart(frames)
        socket.send_multipart([b"", (0).to_bytes(8, "big")])
        assert socket.poll(5000)
        assert socket.recv_multipart() == [b"", b"\xff" * 8, b""]
    finally:
        socket.close()
        context.term()
    assert make_store(at=master).put("k", b"v") == 0


def test_an_address_that_is_taken(make_master):
    taken = zmq.Context.instance().socket(zmq.ROUTER)
    port = taken.bind_to_random_port("tcp://127.0.0.1")
    try:
        with pytest.raises(AssertionError):
            make_master(
                "--enable_kv_events", f"--kv_events_bind_endpoint=tcp://127.0.0.1:{free_port()}",
                "--kv_events_backend_id=p", f"--kv_events_replay_endpoint=tcp://127.0.0.1:{port}",
            )  # fmt: skip
    finally:
        taken.close(0)
