"""Moves, drain jobs and retired segments, one rule at a time."""

from __future__ import annotations

import pytest

from mooncake.master import drains
from mooncake.master.drains import SUCCEEDED
from mooncake.master.objects import parts
from mooncake.rpc.messages import PutOptions
from tests.unit.test_master_directory import KIB, World


def served(world: World) -> None:
    """Copies succeed at once."""
    for segment, message in world.directory.pool.take_outbox():
        if segment.send is not None:
            segment.send(message)
    for _, copy in world.directory.tasks.take_outbox():
        world.directory.tasks.reported(copy.copy_id, 0, world.now)


def go_on(world: World, seconds: float) -> None:
    for _ in range(round(seconds / 0.05)):
        world.wait(0.05)
        served(world)
        world.settle()


def where(world: World, key: str) -> set[str]:
    obj = world.directory.catalog.objects.get(key)
    assert obj is not None
    return {part.segment.name for part in parts(obj)}


def in_two_segments() -> World:
    """The value "k" has a part in each of two segments, and then room is made in both."""
    world = World(("h1", 64 * KIB), ("h2", 64 * KIB), high_watermark=1.0)
    for key, name in (("a", "h1:1"), ("b", "h2:2")):
        assert world.put([key], 40 * KIB, PutOptions(hard_pin=True, preferred=[name])) == [0]
    assert world.put(["k"], 40 * KIB) == [0]
    assert where(world, "k") == {"h1:1", "h2:2"}
    assert world.directory.remove(["a", "b"], True, world.now) == [0, 0]
    world.settle()
    return world


def test_a_value_in_two_segments_leaves_one_of_them() -> None:
    world = in_two_segments()
    number = world.directory.tasks.move("k", "h1:1", "h2:2")
    go_on(world, 1)
    assert world.directory.tasks.state(number).status == 3, "it has ended well"
    assert where(world, "k") == {"h2:2"}


def test_a_value_in_two_segments_is_drained_into_the_other() -> None:
    world = in_two_segments()
    job = world.directory.drains.create(["h1:1"], [], 4)
    go_on(world, 3)
    assert job.status == SUCCEEDED
    assert job.moved == 1
    assert where(world, "k") == {"h2:2"}


def test_a_drain_knows_a_bounded_number_of_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is a few objects for the garbage collector, which holds the loop."""
    monkeypatch.setattr(drains, "_KNOWN_AT_ONCE", 10, raising=False)
    world = World(("h1", 64 * KIB), ("h2", 64 * KIB))
    assert world.put([f"k{i}" for i in range(45)], KIB, PutOptions(preferred=["h1:1"])) == [0] * 45
    job = world.directory.drains.create(["h1:1"], [], 4)
    for _ in range(40):
        go_on(world, 0.1)
        assert len(job.known) <= 10
    assert (job.status, job.moved, len(job.given_up)) == (SUCCEEDED, 45, 0)


def test_a_segment_that_retires_while_it_is_drained_gets_nothing_new() -> None:
    world = World(("h1", 64 * KIB), ("h2", 64 * KIB))
    world.put(["k"], KIB)
    job = world.directory.drains.create(["h1:1"], [], 4)
    world.directory.retire(world.segments[0], world.now)
    world.directory.drains.cancel(job.number)
    world.settle()
    assert world.put([f"k{i}" for i in range(20)], KIB) == [0] * 20
    for i in range(20):
        assert where(world, f"k{i}") == {"h2:2"}
