"""A put that has returned is seen by everybody, at once, though its last message may still be under way."""

import threading

import pytest

ROUNDS = 300


@pytest.mark.parametrize("ask", ["is_exist", "get", "get_size", "remove"])
def test_other_processes_see_a_put_that_has_returned(store, make_worker, ask):
    writer = make_worker()
    for i in range(ROUNDS):
        writer.send("result = store.put(key, b'value')", key=f"k{i}")
        assert writer.receive() == 0
        result = getattr(store, ask)(f"k{i}")
        assert result == {"is_exist": 1, "get": b"value", "get_size": 5, "remove": 0}[ask]


def test_other_threads_see_it(store):
    """Several threads use several connections to the master."""
    wrong = []

    def run(t: int) -> None:
        for i in range(ROUNDS):
            key = f"{t}-{i}"
            if store.put(key, b"v") != 0 or store.is_exist(key) != 1 or store.get(key) != b"v":
                wrong.append(key)

    threads = [threading.Thread(target=run, args=(t,)) for t in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_remove_all_sees_it(store, make_worker):
    writer = make_worker()
    for i in range(50):
        writer.send("result = store.put(key, b'value')", key=f"k{i}")
        assert writer.receive() == 0
        assert store.remove_all() == 1


def test_a_put_whose_connection_breaks_before_the_reply_is_told_again(store, make_worker):
    """The reply to a small put's last message is not waited for; a broken connection must not lose the message."""
    writer = make_worker()
    assert writer("""
import socket
client = store._client.rpc
store.put('warm', b'v')
real_post = client.post
def post_on_dead_connection(message):
    for connection in client._idle:
        connection.sock.shutdown(socket.SHUT_RDWR)
        connection.posted[connection._next_id] = message  # as if it had been sent into a connection that broke
    return None
client.post = post_on_dead_connection
first = store.put('k', b'value')
client.post = real_post
result = [first, store.get('k').decode()]
""") == [0, "value"]
    assert store.get("k") == b"value"
