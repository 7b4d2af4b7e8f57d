"""A subscriber to a master's KV events that keeps everything it hears."""

import time

import msgspec
import zmq

from tests.processes import wait_until


class Subscriber:
    """`numbers` of the messages, `events` in them."""

    def __init__(self, endpoint: str) -> None:
        self.numbers: list[int] = []
        self.batches: list[list] = []
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.linger = 0
        self._socket.set_hwm(0)
        self._socket.connect(endpoint)
        self._socket.subscribe(b"")

    def close(self) -> None:
        self._socket.close()
        self._context.term()

    @property
    def events(self) -> list[dict]:
        return [event for batch in self.batches for event in batch[1]]

    def read(self) -> None:
        """Take what has come."""
        while self._socket.poll(0):
            topic, number, body = self._socket.recv_multipart()
            assert topic == b""
            assert len(number) == 8
            self.numbers.append(int.from_bytes(number, "big"))
            self.batches.append(msgspec.msgpack.decode(body))

    def join(self, store) -> None:
        """Until it hears: what was published before is lost to it.  Leaves nothing in the pool."""
        end = time.monotonic() + 10
        while not self.batches:
            assert time.monotonic() < end, "nothing was heard"
            _come_and_go(store, "join")
            self.read()
        _come_and_go(store, "4711")
        self.wait_for(lambda: (self.events[-1]["event_type"], self.events[-1]["seq_hashes"]) == ("removed", [4711]))
        self.forget()

    def forget(self) -> None:
        self.numbers.clear()
        self.batches.clear()

    def wait_for(self, condition, what: str = "the events") -> None:
        def heard():
            self.read()
            return condition()

        wait_until(heard, 15, what)

    def told(self) -> list[tuple]:
        return [(event["event_type"], event["object_key"], event["medium"]) for event in self.events]

    def expect(self, *wanted: tuple) -> None:
        """Exactly these (event_type, key, medium) come, in any order; then they are forgotten."""
        self.wait_for(lambda: len(self.told()) >= len(wanted), f"{len(wanted)} events, of which came {self.told()}")
        assert sorted(self.told(), key=repr) == sorted(wanted, key=repr)
        self.forget()


def _come_and_go(store, key: str) -> None:
    assert store.put(key, b"x") == 0
    assert store.remove(key, force=True) == 0
