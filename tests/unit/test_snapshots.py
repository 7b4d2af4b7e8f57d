"""Snapshots without processes: their bytes, what they hold, what a directory makes of them, their settings."""

from __future__ import annotations

import random
import subprocess
import sys
from array import array
from typing import Any

import msgspec
import pytest

from mooncake.errors import ConfigError
from mooncake.master.eviction import Lru
from mooncake.master.flags import parse_command_line, read_settings
from mooncake.master.former import Floor, Former, carry_on
from mooncake.master.objects import Object
from mooncake.master.snapshots.blocks import DeadKeys, Head, Order, encode
from mooncake.master.snapshots.child import Job, Outcome
from mooncake.master.snapshots.contents import collect
from mooncake.master.snapshots.file import DamagedError, Writer, bodies, check
from mooncake.master.snapshots.restore import Restored, leave_in_order
from mooncake.master.snapshots.settings import PATH_VARIABLE, SnapshotSettings, snapshot_settings
from mooncake.master.snapshots.stores import Folder, keep_newest
from mooncake.rpc.messages import Record, SegmentInfo
from mooncake.rpc.record_messages import Body
from mooncake.transfer.table import COMPLETE
from tests.unit.test_master_directory import KIB, World


def written(world: World) -> bytes:
    writer = Writer()
    raw = b"".join(writer.block(encode(block)) for block in collect(world.directory, "c"))
    return raw + writer.end()


def test_every_cut_and_every_changed_bit_is_noticed() -> None:
    writer = Writer()
    raw = writer.block(b"head") + writer.block(b"") + writer.block(bytes(100)) + writer.end()
    assert [bytes(body) for body in bodies(raw)] == [b"head", b"", bytes(100)]
    for length in range(len(raw)):
        with pytest.raises(DamagedError):
            check(raw[:length])
    with pytest.raises(DamagedError):
        check(raw + b"\0")
    for bit in range(len(raw) * 8):
        changed = bytearray(raw)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamagedError):
            check(bytes(changed))


def test_blocks_of_another_version_are_no_snapshot() -> None:
    for body in (msgspec.msgpack.encode(["future", 1]), encode(Order(b""))):
        writer = Writer()
        with pytest.raises(DamagedError):
            Restored(writer.block(body) + writer.end())


@pytest.mark.parametrize("cut", [0, 1, 100])
def test_a_child_whose_master_was_killed_keeps_nothing(tmp_path, cut) -> None:
    """Its input ends before the snapshot does."""
    writer = Writer()
    raw = (writer.block(encode(Head("c", "v", 1.0, 2, 3, 4))) + writer.block(bytes(1000)) + writer.end())[:cut]
    settings = SnapshotSettings(True, False, 1.0, 1.0, 2, "c", str(tmp_path), None, "", "")
    done = subprocess.run(
        [sys.executable, "-m", "mooncake.master.snapshots.child"],
        input=msgspec.json.encode(Job(settings, "1.snapshot")) + b"\n" + raw,
        capture_output=True,
        check=True,
    )
    outcome = msgspec.json.decode(done.stdout, type=Outcome)
    assert outcome.name == ""
    assert ("cut short" if cut > 8 else "it ") in outcome.error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_the_newest_are_kept(tmp_path, count) -> None:
    folder = Folder(str(tmp_path), "c")
    for name in ("1.snapshot", "2.damaged", "3.snapshot", "4.snapshot", "5.damaged"):
        folder.write(name, b"x")
    (tmp_path / "c" / "other").touch()
    keep_newest(folder, count, "3.snapshot")  # was written last, by a clock that had gone back
    kept = {
        1: ["3.snapshot", "5.damaged"],
        2: ["2.damaged", "3.snapshot", "4.snapshot", "5.damaged"],
    }  # fmt: skip
    everything = ["1.snapshot", "2.damaged", "3.snapshot", "4.snapshot", "5.damaged"]
    assert folder.names() == kept.get(count, everything)
    folder.set_aside("3.snapshot")
    assert "3.damaged" in folder.names()
    folder.delete("3.damaged")
    folder.delete("3.damaged")
    assert "3.damaged" not in folder.names()


class Returning(World):
    """A directory that announced segments come back to."""

    def back(self, number: int, *records: Record, term: int = 1) -> None:
        info = SegmentInfo(number, f"h1:{number}", 64 * KIB, "", "", "h1", f"9-{number}")
        segment, _ = self.directory.mount(info, term, 0, self.take_kill, self.now)
        for _ in self.directory.announce(segment, list(records), last=True):
            pass
        self.settle()


def record(key: str, seq: int, slot: int = 0, group: str = "", version: int = 0) -> Record:
    return Record([slot], COMPLETE, 1, seq, Body(key, 256, [slot * 256, 256], group=group, version=version))


def keys_of(world: World) -> list[str]:
    return [obj.key for some in world.directory.catalog.objects.slices() for obj in some]


def restored(raw: bytes) -> Returning:
    world = Returning()
    world.now = 500.0
    world.segments.clear()
    Restored(raw).begin(world.directory)
    return world


def test_what_is_dead_stays_dead_and_what_came_later_lives() -> None:
    world = World()
    last = world.directory.granting.last_seq
    world.directory.remove(["removed"], True, world.now)
    world.directory.tombstones.note_group("g", last)
    world.directory.tombstones.undelivered[5] = {3: last}
    again = restored(written(world))
    again.back(
        5, record("removed", last), record("a", last, 1, "g"), record("b", last, 2), record("c", last, 3),
        record("d", last + 1, 4, "g"),
    )  # fmt: skip
    assert keys_of(again) == ["b", "d"]
    assert again.directory.granting.last_seq > last
    assert again.directory.term > world.directory.term


def test_a_snapshot_of_a_restored_master_says_all_that_the_first_one_did() -> None:
    world = World()
    last = world.directory.granting.last_seq
    world.directory.remove(["removed"], True, world.now)
    world.directory.tombstones.undelivered[5] = {3: last}
    world.directory.tombstones.raise_floor(last - 10)
    world.directory.remove(["removed"], True, world.now)
    again = restored(written(restored(written(world))))
    again.back(5, record("removed", last), record("c", last, 3), record("old", last - 10, 4), record("new", last, 5))
    assert keys_of(again) == ["new"]


def test_a_floor_spares_segments_that_were_mounted() -> None:
    """And copies that were made later in one that was not, though the value itself is older."""
    world = World(("h1", 64 * KIB))
    world.wait(700)
    floor = world.directory.tombstones.floor
    assert floor > 0
    again = restored(written(world))
    again.back(1, record("mounted", floor))
    again.back(2, record("away", floor), record("copy", floor + 5, 1, version=floor))
    assert keys_of(again) == ["mounted", "copy"]


def test_a_key_that_is_there_again_is_not_dead() -> None:
    world = World()
    assert world.put(["k"], 256) == [0]
    (obj,) = world.directory.catalog.objects.find_many(["k"])
    assert obj is not None
    world.directory.tombstones.note("k", obj.seq)
    world.directory.tombstones.outbid(obj.seq + 1000)
    (dead,) = [block for block in collect(world.directory, "c") if isinstance(block, DeadKeys) and block.keys]
    assert (dead.keys, dead.seqs) == (["k"], [obj.seq - 1])


def test_only_floors_that_say_something_are_handed_on() -> None:
    floors = carry_on([Floor(5, {1}), Floor(9, {2}), Floor(3, {2, 7}), Floor(0, set())], {4})
    assert [(floor.seq, floor.excepted) for floor in floors] == [(9, {2, 4}), (5, {1, 4})]
    former = Former()
    former.floors = floors
    assert [former.kills(owner, 0, "k", "", 5, 5) for owner in (1, 2, 3, 4)] == [True, True, True, False]


def order_of(world: World) -> list[str]:
    units = [unit for some in world.directory.catalog.order(2) for unit in some]
    return [unit.key for unit in units if isinstance(unit, Object)]


def test_the_order_of_eviction_outlives_the_master() -> None:
    world = World(lease_ms=10)
    keys = [f"k{i}" for i in range(9)]
    assert world.put(keys, 256) == [0] * 9
    world.wait(1)
    for key in ("k3", "k0", "k7"):
        world.directory.exist([key], world.now)
        world.wait(1)
    former = order_of(world)
    assert former[-3:] == ["k3", "k0", "k7"]
    records = [
        record(obj.key, obj.seq, obj.slots >> 8) for some in world.directory.catalog.objects.slices() for obj in some
    ]
    random.Random(1).shuffle(records)
    raw = written(world)
    again = restored(raw)
    again.back(1, *records)
    again.directory.exist(["k5"], again.now)  # used under this master: leaves last
    for _ in leave_in_order(again.directory, Restored(raw).order):
        pass
    again.wait(20)
    assert order_of(again) == [*(key for key in former if key != "k5"), "k5"]


def test_an_order_of_many() -> None:
    world = World(("h1", 1 << 20))
    keys = [f"k{i}" for i in range(2500)]
    assert set(world.put(keys, 256)) == {0}
    seqs = [obj.seq for some in world.directory.catalog.objects.slices() for obj in some]
    random.Random(2).shuffle(seqs)
    for _ in leave_in_order(world.directory, array("Q", [*seqs, 12345])):
        pass
    units = [unit for some in world.directory.catalog.order(100) for unit in some]
    assert [unit.seq for unit in units if isinstance(unit, Object)] == seqs


def test_a_walk_sees_what_is_there_all_the_time() -> None:
    order = Lru()
    units = [Object(key=str(i)) for i in range(10)]
    for unit in units:
        order.touch(unit)
    seen: list[Any] = []
    for some in order.walk(3):
        assert order.victim() is not None
        seen += [unit.key for unit in some]  # type: ignore[attr-defined]
        if len(seen) == 3:
            order.touch(units[1])  # comes again
            order.remove(units[2])  # was seen already
            order.remove(units[3])  # is never seen
            order.put_first(units[5])  # is not either, since it is behind us now
    assert seen == ["0", "1", "2", "4", "6", "7", "8", "9", "1"]
    assert [unit.key for some in order.walk(100) for unit in some] == ["5", "0", "4", "6", "7", "8", "9", "1"]  # type: ignore[attr-defined]
    for unit in units:
        order.remove(unit)
    assert order.victim() is None


def test_tasks_that_had_not_ended_begin_again() -> None:
    world = World(("h1", 64 * KIB), ("h2", 64 * KIB))
    assert world.put(["k"], 256) == [0]
    names = [segment.name for segment in world.segments]
    (obj,) = world.directory.catalog.objects.find_many(["k"])
    assert obj is not None
    assert obj.segment is not None
    source = obj.segment
    (target,) = [segment for segment in world.segments if segment is not source]
    move = world.directory.tasks.move("k", source.name, target.name)
    copy = world.directory.tasks.copy("k", names)
    again = restored(written(world))
    assert [again.directory.tasks.state(task).status for task in (move, copy)] == [0, 0]
    again.wait(5)
    assert [again.directory.tasks.state(task).status for task in (move, copy)] == [0, 0]
    for segment in (source, target):  # the move had been done when the master ended, though the snapshot was older
        info = SegmentInfo(segment.number, segment.name, 64 * KIB, "", "", segment.host, segment.client)
        mounted, _ = again.directory.mount(info, 1, 0, again.take_kill, again.now)
        some = [record("k", obj.seq)] if segment is target else []
        for _ in again.directory.announce(mounted, some, last=True):
            pass
    again.settle()
    again.directory.tasks.resume()
    again.directory.tick(again.now)
    assert again.directory.tasks.state(move).status == 3
    assert again.directory.tasks.state(copy).status == 1  # it copies to the source of the move again


def settings(*arguments: str) -> SnapshotSettings | None:
    return snapshot_settings(read_settings(parse_command_line(arguments)).values)


def test_settings(tmp_path, monkeypatch) -> None:
    assert settings() is None
    monkeypatch.setenv(PATH_VARIABLE, str(tmp_path / "s"))
    found = settings("--enable_snapshot", "--snapshot_payload_backend_type=local", "--cluster_id=a/b")
    assert found is not None
    assert (found.writes, found.restores, found.cluster, found.folder) == (True, False, "a%2Fb", str(tmp_path / "s"))
    assert (found.interval_s, found.limit_s, found.keep) == (600, 300, 2)


LOCAL = "--snapshot_object_store_type=local"


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--enable_snapshot"], ["--enable_snapshot needs", "local", "s3", '""']),
        (["--enable_snapshot_restore"], ["--enable_snapshot_restore needs"]),
        (["--enable_snapshot", "--snapshot_object_store_type=tape"], ["tape"]),
        (["--enable_snapshot", LOCAL, "--snapshot_payload_store_type=s3"], ["contradict each other"]),
        (["--enable_snapshot", LOCAL], [PATH_VARIABLE, "absolute"]),
        (["--enable_snapshot", LOCAL, "--snapshot_interval_seconds=0"], ["snapshot_interval_seconds", "from 1 to"]),
        (["--enable_snapshot", LOCAL, "--snapshot_retention_count=0"], ["snapshot_retention_count", "from 1 to"]),
    ],
)
def test_refusals(arguments, parts, monkeypatch) -> None:
    monkeypatch.delenv(PATH_VARIABLE, raising=False)
    with pytest.raises(ConfigError) as caught:
        settings(*arguments)
    assert all(part in str(caught.value) for part in parts), caught.value


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--snapshot_catalog_store_type=redis"], "connstring"),
        (["--snapshot_catalog_backend_type=etcd"], "embedded or redis"),
        (["--snapshot_catalog_backend_connstring=redis://h:1"], "only of use with"),
        (["--snapshot_backup_dir=here"], "snapshot_backup_dir"),
    ],
)
def test_refusals_of_what_goes_with_a_store(arguments, part, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv(PATH_VARIABLE, str(tmp_path))
    with pytest.raises(ConfigError, match=part):
        settings("--enable_snapshot", LOCAL, *arguments)


def test_settings_of_snapshots_that_are_off() -> None:
    found = read_settings(parse_command_line(["--snapshot_interval_seconds=5"]))
    assert found.notes == [
        "--snapshot_interval_seconds=5 has no effect while enable_snapshot and enable_snapshot_restore are off."
    ]
