"""The master over real sockets."""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Coroutine
from typing import Any

import pytest
import uvloop

from mooncake.master.service import MasterService
from mooncake.rpc import frame
from mooncake.rpc.data_messages import Attach
from mooncake.rpc.messages import (
    KINDS,
    PROTOCOL,
    Codes,
    Exist,
    Failure,
    GetStart,
    Grant,
    Heartbeat,
    Hello,
    LeaseReturn,
    Mounted,
    Ping,
    PutEnd,
    PutOptions,
    PutStart,
    PutStarted,
    Query,
    Record,
    Remove,
    RemoveAll,
    RemoveRegex,
    SegmentQuery,
    Unmount,
    encode,
)
from mooncake.rpc.record_messages import Body
from mooncake.transfer.table import COMPLETE, REMOVED, WRITING
from tests.unit.master_wire import Owner, Wire, master, open_client, open_owner


def run(test: Coroutine[Any, Any, None]) -> None:
    uvloop.run(asyncio.wait_for(test, 30))


async def until(condition: Any, limit: float = 3.0) -> float:
    """Wait until it holds; how long that took."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < limit
        await asyncio.sleep(0.005)
    return time.monotonic() - start


# ---------------------------------------------------------------- session


def test_another_protocol_is_refused_in_plain_words() -> None:
    async def test() -> None:
        async with master() as service:
            wire = Wire()
            await wire.connect(service.port)
            refusal = await wire.call(Hello(PROTOCOL + 1, "9.9", "client", "1-1", "h"))
            assert isinstance(refusal, Failure)
            assert refusal.code == -300
            assert "9.9" in refusal.text
            assert f"protocol {PROTOCOL + 1}" in refusal.text
            await asyncio.wait_for(wire.closed.wait(), 2)

    run(test())


def test_hello_comes_first() -> None:
    async def test() -> None:
        async with master() as service:
            wire = Wire()
            await wire.connect(service.port)
            assert (await wire.call(Ping())).code == -600
            await asyncio.wait_for(wire.closed.wait(), 2)

    run(test())


@pytest.mark.parametrize(
    "first",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        bytes([21, 0, 0, 0]) + struct.pack("<III", 0, 0x12345678, 4) + bytes(4),  # as the C++ store's client begins
        struct.pack("<IHHI", 4, KINDS[Hello], 0, 1) + b"junk",
    ],
)
def test_foreign_programs_are_hung_up_on(first: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """They would otherwise wait for an answer for as long as they please."""

    async def test() -> None:
        async with master() as service:
            reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
            writer.write(first)
            await asyncio.wait_for(reader.read(), 2)
            writer.close()

    run(test())
    assert caplog.records[-1].message.startswith("the connection from 127.0.0.1 is closed: ")


def test_nonsense_does_no_harm() -> None:
    async def test() -> None:
        async with master() as service:
            await open_owner(service.port)
            wire = await open_client(service.port)
            for kind, body in ((999, b"\x90"), (KINDS[Exist], b"\xff"), (KINDS[PutStart], encode(Exist(["a"])))):
                future = wire.send(Ping())
                wire.writer.write(frame.pack(kind, 0, 777, body))
                wire._waiting[777] = (Ping, failed := asyncio.get_running_loop().create_future())
                assert (await failed).code == -600
                assert (await future).codes == [0]
            assert (await wire.call(PutStart(["a"], [1, 2]))).code == -600
            assert (await wire.call(PutStart(["a"], [1], PutOptions(groups=["x", "y"])))).code == -600
            assert (await wire.call(PutStart(["a", "", "b"], [-1, 5, 0]))).grants == [-600, -600, -600]
            assert (await wire.call(PutStart(["a"], [1], PutOptions(replica_num=0)))).grants == [-600]
            assert (await wire.call(PutEnd([1], [2], [3]))).code == -600
            assert (await wire.call(PutEnd([1], [2]))).codes == [-700, -700]
            assert (await wire.call(Attach(1))).code == -600
            assert (await wire.call(RemoveRegex("(", False))).code == -600
            wire.tell(LeaseReturn([1, 2, 3]))
            many = ["k"] * 1_000_001
            assert (await wire.call(Exist(many))).code == -600
            assert (await wire.call(Ping())).codes == [0]
            broken = await open_client(service.port)
            broken.writer.write(struct.pack("<IHHI", 1 << 31, 1, 0, 1))
            await asyncio.wait_for(broken.closed.wait(), 2)
            assert (await wire.call(Ping())).codes == [0]
            assert service.directory.totals().allocated_bytes == 0

    run(test())


def test_segment_messages_that_cannot_be() -> None:
    async def test() -> None:
        async with master() as service:
            owner = await open_owner(service.port)
            for number, size in ((0, 1 << 20), (5, 0), (5, -1), (5, 1 << 60)):
                assert (await owner.mount(number, size)).code == -600
            assert (await owner.mount(5, 1 << 20, term=1 << 50)).code == -600
            assert (await owner.announce(99, [])).code == -101
            assert (await owner.call(Heartbeat([7, 8]))).codes == [0, -101]
            assert (await owner.call(Unmount([8]))).codes == [-101]
            other = Owner()
            await other.connect(service.port)
            await other.hello("segment", "6-6")
            assert (await other.mount(7, 1 << 20, client="6-6")).code == -102

    run(test())


# ---------------------------------------------------------------- life of an object


def test_codes_of_the_life_of_an_object() -> None:
    async def test() -> None:
        async with master() as service:
            owner = await open_owner(service.port)
            a, b = await open_client(service.port, "2-2"), await open_client(service.port, "3-3")
            started = await a.call(PutStart(["k", "k"], [5000, 5000]))
            assert started.grants[1] == -705
            grant = started.grants[0]
            assert grant.replicas[0][0].extents == [0, 5000]
            assert (await b.call(PutStart(["k"], [5]))).grants == [-705]
            assert (await b.call(Exist(["k"]))).found == b"\x00"
            assert (await b.call(GetStart(["k", "l"]))).found == [-703, -704]
            assert (await b.call(Query(["k", "l"]))).found == [-703, -704]
            assert (await b.call(Remove(["k", "l"], False))).codes == [-703, -704]
            assert (await b.call(PutEnd([grant.seq]))).codes == [-601]
            assert (await a.call(PutEnd([grant.seq]))).codes == [0]
            assert (await a.call(PutEnd([grant.seq]))).codes == [0]
            assert (await b.call(PutEnd([grant.seq]))).codes == [-601]
            assert (await b.call(PutStart(["k"], [5]))).grants == [-705]
            got = await b.call(GetStart(["k", "l"]))
            assert (got.found[0].size, got.found[0].places, got.found[1]) == (5000, [[7, 0, 5000]], -704)
            assert (await a.call(Query(["k"]))).found[0].states == [3]
            assert (await a.call(Remove(["k"], False))).codes == [-706]
            assert (await a.call(Remove(["k"], True))).codes == [0]
            await until(lambda: owner.kills)
            assert [kill[3] for kill in owner.kills] == [1]  # hidden only: it is being read
            assert service.directory.quarantined_bytes == 5120
            b.tell(LeaseReturn([got.lease]))
            await until(lambda: service.directory.totals().allocated_bytes == 0)
            assert [kill[3] for kill in owner.kills] == [1, 0]
            infos = (await a.call(SegmentQuery([7, 8]))).segments
            assert [info.segment for info in infos] == [7]

    run(test())


def test_only_the_reader_hands_its_lease_back() -> None:
    async def test() -> None:
        async with master() as service:
            await open_owner(service.port)
            reader, other = await open_client(service.port), await open_client(service.port, "3-3")
            assert await reader.put(["k"], 1000) == [0]
            lease = (await reader.call(GetStart(["k"]))).lease
            other.tell(LeaseReturn([lease, lease + 1, 0, -1]))
            assert (await other.call(Remove(["k"], True))).codes == [0]
            await asyncio.sleep(0.05)
            assert service.directory.totals().allocated_bytes == 1024  # the reader may be in the middle of it
            reader.tell(LeaseReturn([lease]))
            await until(lambda: not service.directory.totals().allocated_bytes)

    run(test())


def test_a_request_that_outlives_its_own_lease_holds_nothing_for_ever() -> None:
    async def test() -> None:
        async with master(lease_ms=1) as service:
            await open_owner(service.port, size=1 << 24)
            client = await open_client(service.port)
            keys = [f"k{i}" for i in range(20_000)]
            assert set(await client.put(keys, 100)) == {0}
            lease = (await client.call(GetStart(keys))).lease
            client.tell(LeaseReturn([lease]))
            assert set((await client.call(Remove(keys, True))).codes) == {0}
            await until(lambda: not service.directory.totals().allocated_bytes)

    run(test())


@pytest.mark.parametrize("request_", [RemoveAll(True), Exist(["k0", "k1", "k2", "k3"])])
def test_steady_small_puts_hold_nobody_up(request_: Any) -> None:
    """A request waits for the eager puts that it met, not for those that came after it."""

    async def test() -> None:
        async with master() as service:
            await open_owner(service.port)
            writer, other = await open_client(service.port), await open_client(service.port, "3-3")
            seqs: list[int] = []

            async def start(i: int) -> None:
                started = await writer.call(PutStart([f"k{i % 4}"], [100], None, True))
                seqs.append(started.grants[0].seq)

            await start(0)
            answer = other.send(request_)
            for i in range(1, 40):  # there is an open one at every moment
                await start(i)
                assert (await writer.call(PutEnd([seqs[-2]]))).codes == [0]
                await writer.call(Remove([f"k{(i - 1) % 4}"], True))
                if answer.done():
                    break
                await asyncio.sleep(0.003)
            assert answer.done()
            assert i < 20

    run(test())


def test_remove_many() -> None:
    async def test() -> None:
        async with master() as service:
            await open_owner(service.port, size=16 << 20)
            wire = await open_client(service.port)
            assert await wire.put([f"k{i}" for i in range(3000)], 300) == [0] * 3000
            await wire.call(Exist(["k10", "k20"]))
            assert (await wire.call(RemoveRegex("^k1.$", False))).count == 9
            assert (await wire.call(RemoveRegex("0$", True))).count == 300
            assert (await wire.call(RemoveAll(False))).count == 3000 - 309
            assert sum((await wire.call(Exist([f"k{i}" for i in range(3000)]))).found) == 0
            await until(lambda: service.directory.totals().allocated_bytes == 0)

    run(test())


def test_big_batches_leave_the_loop_to_others() -> None:
    async def test() -> None:
        async with master() as service:
            await open_owner(service.port, size=64 << 20)
            wire, other = await open_client(service.port), await open_client(service.port, "3-3")
            keys = [f"key-{i:0100d}" for i in range(20_000)]
            started: PutStarted = await wire.call(PutStart(keys, [1000] * len(keys)))
            seqs = [grant.seq for grant in started.grants if isinstance(grant, Grant)]
            assert len(seqs) == len(keys)
            ended = wire.send(PutEnd(seqs))
            pings = 0
            while not ended.done():
                await other.call(Ping())
                pings += 1
            assert (await ended).codes == [0] * len(keys)  # type: ignore[attr-defined]
            assert pings > 3
            assert (await wire.call(Exist([*keys, "x"]))).found == b"\x01" * len(keys) + b"\x00"
            got = await wire.call(GetStart(keys))
            assert [found.size for found in got.found] == [1000] * len(keys)
            totals = service.directory.totals()
            assert (totals.key_count, totals.read_leases) == (len(keys), 1)

    run(test())


# ---------------------------------------------------------------- room


def test_churn_has_no_failed_put() -> None:
    """U008: 16 writers, an owner that takes its time, three times the pool, some of it probed."""

    async def test() -> None:
        async with master(eviction_ratio=0.1) as service:
            owner = await open_owner(service.port, size=4 << 20)
            owner.delay = 0.01

            async def write(writer: int) -> int:
                wire = await open_client(service.port, f"9-{writer}")
                bad = 0
                for i in range(48):
                    codes = await wire.put([f"{writer}-{i}-{j}" for j in range(4)], 4096)
                    bad += len(codes) - codes.count(0)
                return bad

            assert await asyncio.gather(*(write(writer) for writer in range(16))) == [0] * 16
            assert service.counters["master_evicted_key_count"] > 0

    run(test())


def test_a_batch_larger_than_the_headroom() -> None:
    async def test() -> None:
        async with master() as service:
            await open_owner(service.port, size=4 << 20)
            wire = await open_client(service.port)
            assert await wire.put([f"a{i}" for i in range(100)], 32 << 10) == [0] * 100
            assert await wire.put([f"b{i}" for i in range(100)], 32 << 10) == [0] * 100

    run(test())


def test_a_put_waits_for_room_but_not_for_ever() -> None:
    async def test() -> None:
        async with master() as service:
            await open_owner(service.port, size=64 << 10)
            reader, writer = await open_client(service.port), await open_client(service.port, "3-3")
            assert await writer.put(["a"], 64 << 10) == [0]
            got = await reader.call(GetStart(["a"]))
            start = time.monotonic()
            assert (await writer.call(PutStart(["b"], [64 << 10]))).grants == [-200]
            assert 0.6 < time.monotonic() - start < 0.9
            assert (await writer.call(PutStart(["b"], [(64 << 10) + 1]))).grants == [-200]
            assert time.monotonic() - start < 0.95  # at once: it can never fit
            waiting = writer.send(PutStart(["b"], [64 << 10]))
            await asyncio.sleep(0.1)
            await reader.call(Remove(["a"], True))
            reader.tell(LeaseReturn([got.lease]))
            assert isinstance((await waiting).grants[0], Grant)  # type: ignore[attr-defined]

    run(test())


def test_a_value_larger_than_any_segment() -> None:
    async def test() -> None:
        async with master() as service:
            first = await open_owner(service.port, 7, 64 << 10)
            second = await open_owner(service.port, 8, 64 << 10, client="1-2")
            wire = await open_client(service.port)
            assert await wire.put(["a"], 100 << 10) == [0]
            place = (await wire.call(Query(["a"]))).found[0].places[0]
            assert sorted(place[::3]) == [7, 8]
            assert sum(place[2::3]) == 100 << 10
            assert (await wire.call(Remove(["a"], True))).codes == [0]
            await until(lambda: service.directory.totals().allocated_bytes == 0)
            assert len(first.kills) == len(second.kills) == 1

    run(test())


# ---------------------------------------------------------------- failures


def test_a_writer_that_dies_frees_its_key() -> None:
    """U001."""

    async def test() -> None:
        async with master() as service:
            owner = await open_owner(service.port)
            owner.delay = None  # the writer is not known dead yet
            a, b = await open_client(service.port, "2-2"), await open_client(service.port, "3-3")
            grant = (await a.call(PutStart(["k"], [4096]))).grants[0]
            a.abort()
            took = await until(lambda: owner.kills)
            assert 0.8 < took < 1.6
            assert service.directory.quarantined_bytes == 4096
            again = (await b.call(PutStart(["k"], [4096]))).grants[0]
            assert again.replicas[0][0].extents != grant.replicas[0][0].extents
            assert (await b.call(PutEnd([again.seq]))).codes == [0]
            assert service.directory.totals().discarded_bytes == 4096

    run(test())


def test_a_segment_that_comes_back_in_time() -> None:
    async def test() -> None:
        async with master() as service:
            owner = await open_owner(service.port)
            wire = await open_client(service.port)
            await wire.put(["a", "b"], 4096)
            owner.abort()
            await until(lambda: service.directory.segments()[0].status == "SUSPECT")
            assert (await wire.call(GetStart(["a"]))).found[0].size == 4096
            assert (await wire.call(Remove(["b"], True))).codes == [0]
            back = Owner()
            await back.connect(service.port)
            welcome = await back.hello("segment", "1-1")
            assert await back.mount(7, 1 << 20, term=welcome.term) == Mounted(True)
            await until(lambda: [kill[3] for kill in back.kills] == [0])
            assert (await wire.call(Exist(["a", "b"]))).found == b"\x01\x00"
            assert await wire.put(["c"], 4096) == [0]

    run(test())


def test_a_segment_that_expires_and_returns() -> None:
    """What was removed or put again in the meantime is not revived; the rest is."""

    async def test() -> None:
        async with master(closed_ttl_s=0.3) as service:
            first = await open_owner(service.port, 7)
            wire = await open_client(service.port)
            sizes = {"keep": 4096, "again": 5000, "gone": 6000}
            started = await wire.call(PutStart(list(sizes), list(sizes.values())))
            term = started.term
            records = [
                Record(part.slots, COMPLETE, term, grant.seq, Body(key, sizes[key], part.extents))
                for key, grant in zip(sizes, started.grants, strict=True)
                for part in grant.replicas[0]
            ]
            await wire.call(PutEnd([grant.seq for grant in started.grants]))
            first.abort()
            await until(lambda: not service.directory.segments())
            await until(lambda: not service.directory.totals().key_count)
            await open_owner(service.port, 8, client="1-2")
            assert (await wire.call(Remove(["gone"], False))).codes == [-704]
            assert await wire.put(["again"], 100) == [0]
            back = Owner()
            await back.connect(service.port)
            await back.hello("segment", "1-1")
            assert await back.mount(7, 1 << 20, term=term) == Mounted(False)
            assert await back.announce(7, records) == Codes([0])
            assert (await wire.call(Exist(["keep", "again", "gone"]))).found == b"\x01\x01\x00"
            assert (await wire.call(Query(["again"]))).found[0].size == 100
            await until(lambda: sorted(kill[1] for kill in back.kills) == sorted(r.slots[0] for r in records[1:]))
            assert all(kill[3] for kill in back.kills)  # hidden: a reader of before may still be there

    run(test())


def test_a_new_master_learns_what_the_tables_hold() -> None:
    async def test() -> None:
        async with master(lease_ms=300) as service:
            old_term = service.directory.term - 1000
            owner = Owner()
            await owner.connect(service.port)
            await owner.hello("segment", "1-1")
            assert await owner.mount(7, 1 << 20, term=old_term, lease_ms=400) == Mounted(False)
            seq = old_term << 19
            records = [
                Record([0], COMPLETE, old_term, seq, Body("a", 4096, [0, 4096])),
                Record([1], WRITING, old_term, seq + 1, Body("b", 4096, [4096, 4096])),
                Record([2], REMOVED, old_term, seq + 2, Body("c", 4096, [8192, 4096])),
                Record([3], COMPLETE, old_term, seq + 3, Body("d", 8192, [0, 8192])),  # overlaps a
                Record([4], COMPLETE, old_term, seq + 4, Body("e", 4096, [1 << 20, 4096])),  # out of range
                Record([0], COMPLETE, old_term, seq + 5, Body("f", 300, [20480, 300])),  # slot taken
                Record([5], COMPLETE, old_term, seq - 1, Body("a", 100, [24576, 100])),  # older
                Record([6], COMPLETE, old_term, seq + 6, Body("g", 9000, [28672, 4096], parts=2)),  # a part is missing
            ]
            assert await owner.announce(7, records[:3], last=False) == Codes([0])
            wire = await open_client(service.port)
            assert (await wire.call(PutStart(["x"], [10]))).grants == [-200]  # not before the last record
            assert await owner.announce(7, records[3:]) == Codes([0])
            assert (await wire.call(Exist(list("abcdefg")))).found == bytes([1, 0, 0, 0, 0, 0, 0])
            grant = (await wire.call(PutStart(["x"], [4096]))).grants[0]
            assert grant.seq > seq + 6
            assert grant.replicas[0][0].extents[0] not in (0, 8192, 24576, 28672)
            await until(lambda: (7, 1, seq + 1, 0) in owner.kills)
            await until(lambda: (7, 2, seq + 2, 0) in owner.kills, 15.0)
            assert not any(slot == 0 and killed == seq for _, slot, killed, _ in owner.kills)

    run(test())


def test_a_master_whose_clock_went_back() -> None:
    async def test() -> None:
        async with master() as service:
            other = await open_owner(service.port, 8, client="1-2")
            term = service.directory.term + 5000
            owner = Owner()
            await owner.connect(service.port)
            await owner.hello("segment", "1-1")
            assert (await owner.mount(7, 1 << 20, term=term)).code == -300
            await asyncio.wait_for(other.closed.wait(), 2)  # must learn the new term as well
            again = Owner()
            await again.connect(service.port)
            assert (await again.hello("segment", "1-1")).term == term + 1
            assert await again.mount(7, 1 << 20, term=term) == Mounted(False)

    run(test())


def test_close_is_quick_and_frees_the_port() -> None:
    async def test() -> None:
        async with master() as service:
            await open_owner(service.port)
            wire = await open_client(service.port)
            await wire.put(["a"], 1 << 20)
            waiting = wire.send(PutStart(["b"], [1 << 20]))
            start = time.monotonic()
            await service.close()
            assert time.monotonic() - start < 0.2
            with pytest.raises(ConnectionError):
                await waiting

    run(test())


def test_counters() -> None:
    async def test() -> None:
        async with master() as service:
            await open_owner(service.port)
            wire = await open_client(service.port)
            await wire.put(["a"], 4096)
            await wire.put(["b", "c", "c"], 4097)
            await wire.call(GetStart(["a"]))
            await wire.call(GetStart(["a", "zz"]))
            check_counters(service)

    run(test())


def check_counters(service: MasterService) -> None:
    counters = service.counters
    expected = {
        "put_start_requests_total": 1, "batch_put_start_requests_total": 1, "batch_put_start_items_total": 3,
        "batch_put_start_failed_items_total": 1, "batch_put_start_partial_successes_total": 1,
        "put_end_requests_total": 1, "batch_put_end_items_total": 2, "get_replica_list_requests_total": 1,
        "batch_get_replica_list_failed_items_total": 1, "mount_segment_requests_total": 1,
    }  # fmt: skip
    for name, count in expected.items():
        assert counters["master_" + name] == count, name
    assert counters["total_get_nums_"] == 3
    assert counters["valid_get_nums_"] == 2
    assert (counters.value_sizes[12], counters.value_sizes[13], counters.value_bytes) == (1, 2, 4096 + 2 * 4097)
