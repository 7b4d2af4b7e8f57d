"""A publisher of KV events as vLLM has one: numbered messages on one socket, the last ones kept for another."""

import threading
import time
from collections import deque

import msgspec
import zmq

from tests.processes import free_port


def block_hash(tokens: list[int], parent: int | None) -> int:
    """Some engine's own hash of a block, which the indexer cannot know."""
    return hash((tuple(tokens), parent, "engine")) & (1 << 64) - 1


class Publisher:
    """`kept` messages can be replayed; 0: no replay socket."""

    def __init__(self, kept: int = 1000, as_lists: bool = False) -> None:
        self.port, self.replay_port = free_port(), free_port()
        self.endpoint = f"tcp://127.0.0.1:{self.port}"
        self.replay_endpoint = f"tcp://127.0.0.1:{self.replay_port}" if kept else ""
        self.replays = 0
        self._as_lists = as_lists
        self._kept = kept
        self.start()

    def start(self) -> None:
        """Also again, as another life of the engine on the same ports."""
        self.number = 0
        self._messages: deque[tuple[int, bytes]] = deque(maxlen=self._kept)
        self._lock = threading.Lock()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.XPUB)  # as PUB; it sees who subscribes
        self._socket.linger = 0
        self._socket.setsockopt(zmq.XPUB_VERBOSE, 1)
        self._socket.bind(self.endpoint)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._replay, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()
        self._socket.close()
        self._context.term()

    def wait_for_subscriber(self) -> None:
        while True:
            assert self._socket.poll(10_000), "nobody subscribed"
            if self._socket.recv()[:1] == b"\x01":  # 0: somebody has gone
                return

    def publish(self, *events: dict, lost: bool = False) -> None:
        """One message; `lost` on the way, but kept."""
        shown = [self._list(event) for event in events] if self._as_lists else list(events)
        payload = msgspec.msgpack.encode([time.time(), shown, 0])
        with self._lock:
            self._messages.append((self.number, payload))
        if not lost:
            self._socket.send_multipart([b"", self.number.to_bytes(8, "big"), payload])
        self.number += 1

    def raw(self, payload: bytes) -> None:
        self._socket.send_multipart([b"", self.number.to_bytes(8, "big"), payload])
        self.number += 1

    def _list(self, event: dict) -> list:
        names = ("type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium")
        return [event[name] for name in names if name in event]

    def _replay(self) -> None:
        if not self._kept:
            return
        socket = self._context.socket(zmq.ROUTER)
        socket.linger = 0
        socket.bind(self.replay_endpoint)
        while not self._stopped.is_set():
            if not socket.poll(20):
                continue
            client, _, start = socket.recv_multipart()
            self.replays += 1
            with self._lock:
                messages = list(self._messages)
            for number, payload in messages:
                if number >= int.from_bytes(start, "big"):
                    socket.send_multipart([client, b"", b"", number.to_bytes(8, "big"), payload])
            socket.send_multipart([client, b"", b"", b"\xff" * 8, b""])
        socket.close()


def chain(tokens: list[int], size: int) -> list[int]:
    """The engine's hashes of the whole blocks."""
    hashes: list[int] = []
    for at in range(0, len(tokens) - size + 1, size):
        hashes.append(block_hash(tokens[at : at + size], hashes[-1] if hashes else None))
    return hashes


def stored(tokens: list[int], size: int, first: int = 0, count: int | None = None, medium: str = "GPU", **more) -> dict:
    """BlockStored of `count` blocks of a prompt from the `first` on."""
    hashes = chain(tokens, size)
    some = hashes[first : None if count is None else first + count]
    return {
        "type": "BlockStored",
        "block_hashes": some,
        "parent_block_hash": hashes[first - 1] if first else None,
        "token_ids": tokens[first * size : (first + len(some)) * size],
        "block_size": size,
        "lora_id": None,
        "medium": medium,
        **more,
    }


def removed(tokens: list[int], size: int, first: int, count: int | None = None, medium: str = "GPU", **more) -> dict:
    some = chain(tokens, size)[first : None if count is None else first + count]
    return {"type": "BlockRemoved", "block_hashes": some, "medium": medium, **more}


CLEARED = {"type": "AllBlocksCleared"}
