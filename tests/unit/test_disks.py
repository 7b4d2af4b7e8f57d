"""The master's rules about values on disk, one by one: reports come when, and as often as, a test says."""

from __future__ import annotations

from typing import Any

import pytest

from mooncake.errors import StoreError
from mooncake.master.objects import WRITING, Object, in_memory, on_disk, replicas
from mooncake.master.pool import Segment
from mooncake.rpc.disk_messages import DiskMount, DiskOrders, DiskRecord, DiskReport
from mooncake.rpc.messages import Kill, PutOptions, Record
from mooncake.rpc.record_messages import Body
from mooncake.rpc.task_messages import CopyPart
from mooncake.transfer import table
from tests.unit.test_master_directory import KIB, World


class DiskWorld(World):
    """Every segment's server has a disk, and writes nothing by itself."""

    def __init__(self, *segments: tuple[str, int], **settings: Any) -> None:
        self.orders: list[DiskOrders] = []
        self.copies: list[CopyPart] = []
        super().__init__(*segments, enable_offload=True, **settings)
        for segment in self.segments:
            self.mount_disk(segment)

    def mount_disk(self, segment: Segment, *records: DiskRecord) -> None:
        self.directory.disks.mount(segment, DiskMount(segment.number, 100 + segment.number, 0, "/d"), self.now)
        for _ in self.directory.disk_recovery.announce(segment, list(records), True):
            pass

    def announce(self, segment: Segment, record: Record) -> None:
        segment.filled = segment.announced = False
        for _ in self.directory.announce(segment, [record], True):
            pass
        self.settle()

    def take_kill(self, kill: Kill | DiskOrders) -> None:
        if isinstance(kill, DiskOrders):
            self.orders.append(kill)
        else:
            super().take_kill(kill)

    def settle(self) -> None:
        super().settle()
        self.copies += [copy for _, copy in self.directory.tasks.take_outbox()]

    def object(self, key: str) -> Object:
        found = self.directory.catalog.objects.get(key)
        assert found is not None
        return found

    def written(self, segment: Segment, key: str, seq: int, **others: Any) -> None:
        self.directory.disks.report(segment, DiskReport(segment.number, [seq], [key], **others), self.now)
        self.settle()

    def take_orders(self) -> list[tuple[int, str, int]]:
        """(segment, what, number) of each, since the last call."""
        self.settle()
        orders, self.orders = self.orders, []
        return [
            (order.segment, what, seq)
            for order in orders
            for what, seqs in (
                ("write", order.seqs),
                ("gather", [gather.seq for gather in order.gather]),
                ("drop", order.drop),
            )
            for seq in seqs
        ]

    def move(self, key: str, source: Segment, target: Segment) -> None:
        """All of a move but the bytes."""
        self.directory.tasks.move(key, source.name, target.name)
        self.wait(0.25)
        (copy,), self.copies = self.copies, []
        self.directory.tasks.reported(copy.copy_id, 0, self.now)
        self.settle()


def on(segment: Segment) -> PutOptions:
    return PutOptions(preferred=[segment.name])


def test_a_write_that_was_called_off_is_not_believed() -> None:
    """Neither when its report comes late, nor when that comes once more."""
    world = DiskWorld(("h1", 64 * KIB), ("h2", 64 * KIB))
    source, target = world.segments
    assert world.put(["k"], 4 * KIB, on(source)) == [0]
    seq = world.object("k").seq
    assert world.take_orders() == [(1, "write", seq)]
    world.move("k", source, target)
    assert world.take_orders() == [(1, "drop", seq)]
    assert not world.object("k").flags & WRITING
    world.written(source, "k", seq)
    assert not on_disk(world.object("k"))
    for _ in range(2):
        world.written(source, "k", seq, dropped=[seq])
        assert not on_disk(world.object("k"))
    assert world.directory.totals().disks["file_cache_nums_"] == 0


def test_a_moved_value_is_written_where_it_is() -> None:
    """By the number of its record there; a new master knows both again, whichever is announced first."""
    world = DiskWorld(("h1", 64 * KIB), ("h2", 64 * KIB), offload_on_evict=True)
    source, target = world.segments
    assert world.put(["k"], 4 * KIB, on(source)) == [0]
    world.move("k", source, target)
    obj = world.object("k")
    ((part,),) = replicas(obj)
    assert part.seq > obj.seq
    assert world.directory.catalog.evict(4 * KIB, world.now, 10) == 4 * KIB
    assert world.take_orders() == [(2, "write", part.seq)]
    world.written(target, "k", part.seq)
    assert not in_memory(obj)
    assert world.there(["k"]) == "k"
    body = Body("k", 4 * KIB, [], version=obj.seq)
    for memory_first in (True, False):
        after = DiskWorld(("h1", 64 * KIB))
        target = after.directory.mount(after.segments[0].info, 0, 0, after.take_kill, after.now)[0]
        record = Record([0], table.COMPLETE, 1, part.seq, Body("k", 4 * KIB, [0, 4 * KIB], version=obj.seq))
        if memory_first:
            after.announce(target, record)
        after.mount_disk(target, DiskRecord(part.seq, body))
        if not memory_first:
            assert not in_memory(after.object("k"))
            after.announce(target, record)
        found = after.object("k")
        assert found.seq == obj.seq
        assert in_memory(found)
        assert on_disk(found)
        assert after.directory.totals().in_memory == 1
        assert after.directory.catalog.evict(4 * KIB, after.now, 10) == 4 * KIB
        assert not in_memory(after.object("k"))


def test_a_move_does_not_keep_a_value_that_was_to_leave() -> None:
    world = DiskWorld(("h1", 64 * KIB), ("h2", 64 * KIB), offload_on_evict=True)
    source, target = world.segments
    assert world.put(["k"], 4 * KIB, on(source)) == [0]
    assert world.directory.catalog.evict(4 * KIB, world.now, 10) == 4 * KIB
    assert source.leaving == 4 * KIB
    world.move("k", source, target)
    assert source.leaving == 0
    assert world.directory.catalog.evict(4 * KIB, world.now, 10) == 4 * KIB
    ((part,),) = replicas(world.object("k"))
    assert world.take_orders()[-1] == (2, "write", part.seq)


@pytest.mark.parametrize("how", ["idle", "fresh", "leased"])
def test_every_way_out_of_memory_goes_over_the_disk(how: str) -> None:
    world = DiskWorld(offload_on_evict=True, break_lease_after_s=0.0)
    catalog = world.directory.catalog
    assert world.put(["k"], 4 * KIB) == [0]
    if how == "leased":
        assert world.directory.exist(["k"], world.now) == b"\x01"
        world.wait(0.25)
        freed = catalog.break_leases(4 * KIB, world.now, 10)
    elif how == "fresh":
        freed = catalog.evict_fresh(4 * KIB, world.now, 10)
    else:
        world.wait(world.directory.config.lease_ms / 1000 + 1)
        freed = catalog.evict(4 * KIB, world.now, 10)
    assert freed == 4 * KIB
    assert world.take_orders() == [(1, "write", world.object("k").seq)]
    assert in_memory(world.object("k"))
    world.written(world.segments[0], "k", world.object("k").seq)
    assert not in_memory(world.object("k"))
    assert on_disk(world.object("k"))
    assert world.directory.totals().allocated_bytes == 0


def on_disk_only(world: DiskWorld, key: str, size: int = 4 * KIB) -> int:
    """Put it, and have it leave memory; its number."""
    assert world.put([key], size) == [0]
    seq = world.object(key).seq
    segment = world.object(key).segment
    assert segment is not None
    world.written(segment, key, seq)
    world.wait(world.directory.config.lease_ms / 1000 + 1)
    assert world.directory.catalog.evict(size, world.now, 10) == size
    world.take_orders()
    assert not in_memory(world.object(key))
    return seq


def test_an_upsert_drops_nothing_that_frees_no_memory() -> None:
    world = DiskWorld()
    on_disk_only(world, "k")
    assert world.put(["pinned"], 60 * KIB, PutOptions(hard_pin=True)) == [0]
    assert world.put(["k"], 8 * KIB, PutOptions(upsert=True)) == [-200]
    assert world.there(["k"]) == "k"


def test_an_upsert_takes_the_place_of_what_is_on_disk() -> None:
    world = DiskWorld()
    seq = on_disk_only(world, "k")
    assert world.put(["k"], 8 * KIB, PutOptions(upsert=True)) == [0]
    assert (1, "drop", seq) in world.take_orders()
    assert in_memory(world.object("k"))
    assert not on_disk(world.object("k"))
    assert world.directory.totals().in_memory == 1


def test_clearing_of_single_replicas() -> None:
    world = DiskWorld(("h1", 64 * KIB), ("h2", 64 * KIB))
    first, second = world.segments
    catalog = world.directory.catalog
    seq = on_disk_only(world, "d")
    assert catalog.clear(["d"], first.name, "2-2", world.now) == []
    assert catalog.clear(["d"], second.name, "2-2", world.now) == []
    assert world.put(["k"], 4 * KIB, on(first)) == [0]
    world.written(first, "k", world.object("k").seq)
    assert catalog.clear(["k"], second.name, "2-2", world.now) == []
    assert catalog.clear(["k"], first.name, "2-2", world.now) == ["k"]
    assert not in_memory(world.object("k"))
    assert on_disk(world.object("k"))
    world.take_orders()
    assert catalog.clear(["d", "k"], "", "2-2", world.now) == ["d", "k"]
    assert ("drop", seq) in [order[1:] for order in world.take_orders()]
    assert world.there(["d", "k"]) == "--"
    assert world.directory.totals().allocated_bytes == 0


def test_only_memory_is_copied() -> None:
    world = DiskWorld(("h1", 64 * KIB), ("h2", 64 * KIB))
    on_disk_only(world, "k")
    with pytest.raises(StoreError, match="only on disk"):
        world.directory.tasks.copy("k", [world.segments[1].name])


def test_a_replica_that_comes_back_is_in_memory_again() -> None:
    """Its value was known from another server's disk only."""
    world = DiskWorld()
    body = Body("k", 4 * KIB, [])
    (disk_owner,) = world.segments
    world.directory.disks.lose(disk_owner, world.now)
    world.mount_disk(disk_owner, DiskRecord(7, body))
    assert world.directory.totals().in_memory == 0
    other = world.mount(5, "h2", 64 * KIB)
    world.announce(other, Record([0], table.COMPLETE, 1, 7, Body("k", 4 * KIB, [0, 4 * KIB])))
    assert world.directory.totals().in_memory == 1
    assert world.directory.catalog.evict(4 * KIB, world.now, 10) == 4 * KIB
    assert world.directory.totals().in_memory == 0
    assert world.there(["k"]) == "k"


def in_parts(world: DiskWorld, key: str) -> Object:
    """A value that needs both segments."""
    assert world.put([key], 96 * KIB) == [0]
    obj = world.object(key)
    assert [len(replica) for replica in replicas(obj)] == [2]
    return obj


def leaving(world: DiskWorld) -> list[int]:
    return [segment.leaving for segment in world.segments]


def test_a_value_in_parts_is_written_whole() -> None:
    """One server is told where all of it is; both segments' memory comes free when that has been written."""
    world = DiskWorld(("h1", 64 * KIB), ("h2", 64 * KIB), offload_on_evict=True)
    obj = in_parts(world, "k")
    (replica,) = replicas(obj)
    assert world.directory.catalog.evict(KIB, world.now, 10) == 96 * KIB
    assert leaving(world) == [part.taken for part in sorted(replica, key=lambda part: part.segment.number)]
    world.settle()
    ((gather,),) = [order.gather for order in world.orders]
    assert gather.seq == obj.seq
    assert [(p.segment, p.tcp, p.slot, p.extents) for p in gather.pieces] == [
        (p.segment.number, p.segment.info.tcp, p.slots[0], list(p.extents)) for p in replica
    ]
    writer = next(segment for segment in world.segments if segment.number == world.orders[0].segment)
    world.written(writer, "k", obj.seq)
    assert not in_memory(obj)
    assert on_disk(obj)
    assert leaving(world) == [0, 0]
    assert world.directory.totals().allocated_bytes == 0


@pytest.mark.parametrize("loser", [0, 1])
def test_a_part_that_is_lost_calls_the_write_off(loser: int) -> None:
    world = DiskWorld(("h1", 64 * KIB), ("h2", 64 * KIB), offload_on_evict=True)
    obj = in_parts(world, "k")
    assert world.directory.catalog.evict(KIB, world.now, 10) == 96 * KIB
    ((number, what, seq),) = world.take_orders()
    assert (what, seq) == ("gather", obj.seq)
    world.directory.unmount(world.segments[loser], world.now)
    world.wait(0.25)
    assert world.there(["k"]) == "-"
    assert leaving(world) == [0, 0]
    left = world.segments[1 - loser]
    assert world.take_orders() == ([(number, "drop", seq)] if number == left.number else [])
    if number == left.number:
        world.written(left, "k", seq)
        assert world.there(["k"]) == "-"
        assert world.directory.totals().disks["mooncake_offload_queue"] == 0


def test_the_order_is_given_again_after_a_lost_connection() -> None:
    world = DiskWorld(("h1", 64 * KIB), ("h2", 64 * KIB))
    obj = in_parts(world, "k")
    ((number, _, _),) = world.take_orders()
    segment = next(segment for segment in world.segments if segment.number == number)
    request = DiskMount(number, 100 + number, 0, "/d")
    assert world.directory.disks.mount(segment, request, world.now)
    assert world.take_orders() == [(number, "gather", obj.seq)]


def test_a_lost_disk_no_longer_promises_the_other_segments_room() -> None:
    world = DiskWorld(("h1", 64 * KIB), ("h2", 64 * KIB), offload_on_evict=True)
    in_parts(world, "k")
    assert world.directory.catalog.evict(KIB, world.now, 10) == 96 * KIB
    ((number, _, _),) = world.take_orders()
    writer = next(segment for segment in world.segments if segment.number == number)
    world.directory.unmount_disk(writer, world.now)
    assert leaving(world) == [0, 0]
    assert world.there(["k"]) == "k"


def test_one_of_two_disks_is_enough() -> None:
    world = DiskWorld(("h1", 64 * KIB), ("h2", 64 * KIB))
    world.directory.unmount_disk(world.segments[0], world.now)
    obj = in_parts(world, "k")
    assert world.take_orders() == [(2, "gather", obj.seq)]
    other = DiskWorld(("h1", 64 * KIB), ("h2", 64 * KIB))
    for segment in other.segments:
        other.directory.unmount_disk(segment, other.now)
    in_parts(other, "k")
    assert other.take_orders() == []
