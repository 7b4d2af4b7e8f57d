"""The limits of tasks and promotions that the master's flags set, one by one; copies end when a test says."""

from __future__ import annotations

from typing import Any

import pytest

from mooncake.errors import ErrorCode, StoreError
from mooncake.master.tasks import FAILED, PENDING, PROCESSING, SUCCESS
from tests.unit.test_disks import DiskWorld, on, on_disk_only
from tests.unit.test_master_directory import KIB


def world_of(count: int, **limits: Any) -> tuple[DiskWorld, list[tuple[int, int]]]:
    """A world with a copy task of each of `count` values, from h1 to h2."""
    world = DiskWorld(("h1", 256 * KIB), ("h2", 256 * KIB), **limits)
    first, second = world.segments
    keys = [f"k{i}" for i in range(count)]
    assert world.put(keys, 4 * KIB, on(first)) == [0] * count
    return world, [world.directory.tasks.copy(key, [second.name]) for key in keys]


def states(world: DiskWorld, tasks: list[tuple[int, int]]) -> list[int]:
    return [world.directory.tasks.state(task).status for task in tasks]


def test_pending_tasks_are_limited() -> None:
    world, tasks = world_of(3, max_pending_tasks=3)
    assert world.put(["more"], 4 * KIB, on(world.segments[0])) == [0]
    with pytest.raises(StoreError) as refused:
        world.directory.tasks.copy("more", [world.segments[1].name])
    assert refused.value.code == ErrorCode.TASK_PENDING_LIMIT_EXCEEDED
    world.wait(0.25)
    assert states(world, tasks) == [PROCESSING] * 3
    world.directory.tasks.copy("more", [world.segments[1].name])


def test_tasks_at_a_time_are_limited() -> None:
    world, tasks = world_of(3, max_processing_tasks=2)
    world.wait(0.25)
    assert states(world, tasks) == [PROCESSING, PROCESSING, PENDING]
    world.directory.tasks.reported(world.copies[0].copy_id, 0, world.now)
    world.wait(0.25)
    assert states(world, tasks) == [SUCCESS, PROCESSING, PROCESSING]


def test_finished_tasks_are_forgotten() -> None:
    world, tasks = world_of(3, max_finished_tasks=1)
    world.wait(0.25)
    for copy in world.copies:
        world.directory.tasks.reported(copy.copy_id, 0, world.now)
    world.wait(0.25)
    for forgotten in tasks[:2]:
        with pytest.raises(StoreError) as unknown:
            world.directory.tasks.state(forgotten)
        assert unknown.value.code == ErrorCode.TASK_NOT_FOUND
    assert states(world, tasks[2:]) == [SUCCESS]


def test_a_task_that_waits_too_long_fails() -> None:
    world, tasks = world_of(2, max_processing_tasks=1, pending_task_timeout_s=5.0, processing_task_timeout_s=0.0)
    world.wait(4.0)
    assert states(world, tasks) == [PROCESSING, PENDING]
    world.wait(2.0)
    assert states(world, tasks) == [PROCESSING, FAILED]
    assert "waited for too long" in world.directory.tasks.state(tasks[1]).message


def test_a_task_that_takes_too_long_is_tried_so_often_and_fails() -> None:
    world, tasks = world_of(1, processing_task_timeout_s=5.0, max_task_retries=1)
    for _ in range(6):
        world.wait(6.0)
    assert states(world, tasks) == [FAILED]
    assert len(world.copies) == 2
    assert not world.directory.totals().quarantined_bytes


def test_promotions_want_so_many_reads_and_go_so_many_at_a_time() -> None:
    limits = {"promotion_admission_threshold": 3, "promotion_max_per_heartbeat": 2, "promotion_queue_limit": 1}
    world = DiskWorld(("h1", 256 * KIB), promotion_on_hit=True, **limits)
    objects = []
    for i in range(5):
        on_disk_only(world, f"k{i}")
        objects.append(world.object(f"k{i}"))
    promotions = world.directory.disks.promotions
    for _ in range(2):
        for obj in objects:
            promotions.hit(obj)
    assert promotions.in_flight == 0
    for obj in objects:
        promotions.hit(obj)
    assert promotions.in_flight == 2
    counters = world.directory.counters
    assert counters["master_promotion_rejected_frequency_total"] == 10
    assert counters["master_promotion_candidate_recorded_total"] == 3
    assert counters["master_promotion_candidate_dropped_limit_total"] == 2
    world.settle()
    first = next(order.promote[0] for order in world.orders if order.promote)
    promotions.report(world.segments[0], [first.seq], [], world.now)
    assert promotions.in_flight == 2
    assert counters["master_promotion_completed_total"] == 1
