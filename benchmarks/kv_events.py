"""What KV events cost: a master for each one, the indexer for each block, and for a long prompt that everybody has.

    python -m benchmarks.kv_events

Times are those of one thread on its processor.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable

import msgspec

from mooncake.indexer.events import decode
from mooncake.indexer.hashing import Chain, token_bytes
from mooncake.indexer.index import Index, match
from mooncake.master.config import MasterConfig
from mooncake.master.counters import Counters
from mooncake.master.directory import Directory
from mooncake.master.kv_events import KvEvents
from mooncake.master.kv_publisher import MOST_IN_BATCH, KvPublisher
from mooncake.rpc.messages import Grant, SegmentInfo

COUNT = 64_000
BLOCK = 16
TOKENS = 100_000
INSTANCES = 20


def _spent(work: Callable[[], object]) -> float:
    """Seconds of this thread."""
    began = time.thread_time()
    work()
    return time.thread_time() - began


def puts(events: KvEvents | None) -> float:
    """Microseconds of the directory for a put of a small value."""
    directory = Directory(MasterConfig(), Counters(), clock=lambda: 1000.0)
    directory.catalog.events = events
    directory.mount(SegmentInfo(1, "h:1", 1 << 34, "", "", "h", "server"), 0, 0, lambda _: None, 1000.0)
    client = directory.clients.arrive("c", "h")

    def work() -> None:
        for i in range(COUNT):
            grant = directory.granting.grant_one(client, f"{i:020d}", 4096, 1000.0, eager=False)
            assert isinstance(grant, Grant)
            directory.end_puts([grant.seq], {}, client, 1000.0)

    return _spent(work) / COUNT * 1e6


async def publishing(events: KvEvents) -> float:
    """Microseconds of the loop for each event that waits."""
    counters = Counters()
    publisher = KvPublisher(events, counters, "tcp://127.0.0.1:0", "x", legacy=True, with_keys=True)
    count = len(events)

    def work() -> None:
        while events:
            publisher.send(events.take(MOST_IN_BATCH))

    spent = _spent(work)
    publisher.close()
    return spent / count * 1e6


def stored(seed: int, blocks: int) -> tuple[list[int], bytes]:
    """A prompt, and the message in which an engine tells its blocks."""
    numbers = random.Random(seed)
    tokens = [numbers.randrange(150_000) for _ in range(blocks * BLOCK)]
    event = {
        "type": "BlockStored",
        "block_hashes": [numbers.getrandbits(64) for _ in range(blocks)],
        "parent_block_hash": None,
        "token_ids": tokens,
        "block_size": BLOCK,
        "lora_id": None,
        "medium": "GPU",
    }
    return tokens, msgspec.msgpack.encode([time.time(), [event], 0])


def main() -> None:
    events = KvEvents(1 << 30, Counters())
    without, with_events = puts(None), puts(events)
    sending = asyncio.run(publishing(events))
    print(f"a put in the directory: {without:.1f} us; with its event {with_events:.1f}; to publish it {sending:.1f}")

    index = Index(seed=0, most_blocks=1 << 30)
    holdings = [index.join() for _ in range(INSTANCES)]
    blocks = TOKENS // BLOCK
    tokens, message = stored(1, blocks)
    first = _spent(lambda: index.apply(holdings[0], decode(message).events)) / blocks * 1e6
    rest = _spent(lambda: [index.apply(each, decode(message).events) for each in holdings[1:]])
    again = rest / blocks / (INSTANCES - 1) * 1e6
    print(f"a block in the indexer: {first:.1f} us the first time, {again:.1f} when another instance has it too")

    def query() -> None:
        chain = Chain(index.hasher, token_bytes(tokens), BLOCK, "", "")
        assert {match(chain, {0: each}, BLOCK).longest for each in holdings} == {blocks}

    print(f"a query of {TOKENS} tokens that {INSTANCES} instances have: {_spent(query) * 1e3:.1f} ms")


if __name__ == "__main__":
    main()
