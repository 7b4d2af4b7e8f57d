"""Copy and move tasks, and clearing of single replicas: exact results, and what a restart of the master makes of it."""

import pytest

from mooncake.store import MooncakeDistributedStore, ReplicateConfig, TaskStatus, TaskType
from tests.processes import wait_until

MIB = 1 << 20
ENDED = (TaskStatus.SUCCESS, TaskStatus.FAILED)


def config(**settings) -> ReplicateConfig:
    made = ReplicateConfig()
    for name, value in settings.items():
        setattr(made, name, value)
    return made


@pytest.fixture
def two(make_store):
    """Two stores with segments of 32 MiB."""
    return make_store(segment=32 * MIB), make_store(segment=32 * MIB)


def put_in(store, key: str, value: bytes) -> None:
    assert store.put(key, value, config(preferred_segment=store.get_hostname())) == 0


def where(store, key: str) -> list[str]:
    return sorted(
        replica.get_memory_descriptor().buffer_descriptor.transport_endpoint for replica in store.get_replica_desc(key)
    )


def finish(store, created: tuple[tuple[int, int], int]):
    """What a task has come to."""
    task, code = created
    assert code == 0
    seen = []

    def ended() -> bool:
        state, code = store.query_task(task)
        assert code == 0
        seen.append(state)
        return state.status in ENDED

    wait_until(ended, limit=20, what="the end of the task")
    return seen[-1]


def test_a_copy(two):
    a, b = two
    put_in(a, "k", b"value" * 100_000)
    (at_a,) = where(a, "k")
    task, code = a.create_copy_task("k", [b.get_hostname()])
    state = finish(a, (task, code))
    assert (state.type, state.status, state.id) == (TaskType.REPLICA_COPY, TaskStatus.SUCCESS, task)
    assert state.message == "Task completed successfully"
    assert state.last_updated_at_ms_epoch >= state.created_at_ms_epoch > 1 << 40
    assert type(task) is type(state.assigned_client) is tuple
    assert repr(state).startswith(f"QueryTaskResponse(id={task[0]}-{task[1]}, type=0, status=3, created_at=")
    assert len(where(a, "k")) == 2
    assert finish(b, a.create_copy_task("k", [b.get_hostname(), a.get_hostname()])).status == TaskStatus.SUCCESS
    assert len(where(a, "k")) == 2
    a.close()
    wait_until(lambda: b.get("k") == b"value" * 100_000, what="the copy alone")
    assert at_a not in where(b, "k")


def test_a_move(master, two):
    a, b = two
    put_in(a, "k", b"move" * 1000)
    (at_a,) = where(a, "k")
    state = finish(a, a.create_move_task("k", a.get_hostname(), b.get_hostname()))
    assert (state.type, state.status) == (TaskType.REPLICA_MOVE, TaskStatus.SUCCESS)
    (at_b,) = where(a, "k")
    assert at_b != at_a
    assert a.get("k") == b.get("k") == b"move" * 1000
    assert finish(a, a.create_move_task("k", b.get_hostname(), a.get_hostname())).status == TaskStatus.SUCCESS
    assert where(a, "k") == [at_a]
    assert finish(a, a.create_copy_task("k", [b.get_hostname()])).status == TaskStatus.SUCCESS
    assert finish(a, a.create_move_task("k", a.get_hostname(), b.get_hostname())).status == TaskStatus.SUCCESS
    assert where(a, "k") == [at_b]  # it was there already
    assert a.remove("k", force=True) == 0
    wait_until(lambda: master.metric("master_allocated_bytes") == 0, limit=15, what="the return of all room")


def test_what_is_refused(two):
    a, b = two
    put_in(a, "k", b"v")
    name, other = a.get_hostname(), b.get_hostname()
    assert a.create_copy_task("none", [other]) == a.create_copy_task("", [other]) == ((0, 0), -704)
    for targets in ([], ["nobody:1"], [other, "nobody:1"]):
        assert a.create_copy_task("k", targets) == ((0, 0), -600)
    for source, target in ((name, name), ("nobody:1", other), (name, "nobody:1"), (other, name)):
        assert a.create_move_task("k", source, target) == ((0, 0), -600)
    assert a.create_move_task("none", name, other) == ((0, 0), -704)
    assert a.query_task((1, 2)) == (None, -1400)
    for bad in (5, (1,), ("a", "b")):
        with pytest.raises(TypeError):
            a.query_task(bad)
    fresh = MooncakeDistributedStore()
    assert fresh.create_copy_task("k", [other]) == fresh.create_move_task("k", name, other) == ((0, 0), -600)
    assert fresh.query_task((1, 2)) == (None, -600)
    assert fresh.batch_replica_clear(["k"]) == []


def test_no_room(two):
    a, b = two
    put_in(a, "big", b"v" * (20 * MIB))
    assert b.put("hard", b"w" * (20 * MIB), config(preferred_segment=b.get_hostname(), with_hard_pin=True)) == 0
    state = finish(a, a.create_copy_task("big", [b.get_hostname()]))
    assert (state.status, state.message) == (TaskStatus.FAILED, "NO_AVAILABLE_HANDLE (max retries reached: 10)")
    assert a.get("big") == b"v" * (20 * MIB)
    assert len(where(a, "big")) == 1


def test_a_value_that_is_gone_when_its_turn_comes(two):
    a, b = two
    assert a.batch_put_session_start(["open"], [10]) == [0]
    created = a.create_copy_task("open", [b.get_hostname()])
    assert a.batch_put_session_revoke(["open"]) == [0]
    assert finish(a, created).message == "OBJECT_NOT_FOUND (max retries reached: 10)"


def test_a_value_stays_as_it_is_while_it_is_copied(two):
    a, b = two
    values = {f"k{i}": bytes([i]) * MIB for i in range(20)}
    for key, value in values.items():
        put_in(a, key, value)
    created = {key: a.create_copy_task(key, [b.get_hostname()]) for key in values}
    codes = [a.upsert(key, b"new" * 1000) for key in values]
    assert set(codes) <= {0, -708}
    assert set(a.batch_remove(list(values), force=True)) <= {0, -708}
    for key, value in values.items():
        finish(a, created[key])
        assert a.get(key) in (b"", b"new" * 1000, value)


def test_copies_of_one_value_follow_one_another(two):
    a, b = two
    put_in(a, "k", b"v" * MIB)
    first, second = (a.create_copy_task("k", [b.get_hostname()]) for _ in range(2))
    assert finish(a, first).status == finish(a, second).status == TaskStatus.SUCCESS
    assert len(where(a, "k")) == 2


def test_a_value_in_several_parts(make_store):
    a, b = make_store(segment=16 * MIB), make_store(segment=16 * MIB)
    value = bytes(range(256)) * (20 * MIB // 256)
    assert a.put("k", value) == 0  # too large for one segment
    c = make_store(segment=64 * MIB)
    assert finish(c, c.create_copy_task("k", [c.get_hostname()])).status == TaskStatus.SUCCESS
    b.close()
    wait_until(lambda: a.get("k") == value, what="the copy alone")


def test_a_new_master_knows_the_copies(master, two):
    a, b = two
    for key in ("copied", "moved", "removed", "replaced"):
        put_in(a, key, key.encode() * 1000)
    name, other = a.get_hostname(), b.get_hostname()
    for key in ("copied", "removed", "replaced"):
        assert finish(a, a.create_copy_task(key, [other])).status == TaskStatus.SUCCESS
    assert finish(a, a.create_move_task("moved", name, other)).status == TaskStatus.SUCCESS
    assert a.remove("removed", force=True) == 0
    assert a.upsert("replaced", b"new") == 0
    wait_until(lambda: len(where(a, "replaced")) == 1, what="the upsert")
    master.kill()
    master.start()
    wait_until(lambda: len(where(a, "copied")) == 2, limit=20, what="both replicas")
    wait_until(lambda: a.get("moved") == b"moved" * 1000, what="the moved value")
    wait_until(lambda: a.get("replaced") == b"new", what="the new value")
    assert len(where(a, "moved")) == 1
    assert a.is_exist("removed") == 0
    assert a.remove("copied", force=True) == 0
    b.close()
    assert a.is_exist("copied") == 0


def test_a_target_that_dies(make_store, make_worker):
    a, worker = make_store(segment=32 * MIB), make_worker(segment=32 * MIB)
    other = worker("result = store.get_hostname()")
    put_in(a, "k", b"v" * (20 * MIB))
    created = a.create_copy_task("k", [other])
    worker.kill()
    state = finish(a, created)
    assert state.status in ENDED
    assert a.get("k") == b"v" * (20 * MIB)
    wait_until(lambda: a.remove("k", force=True) == 0, what="the removal")


def test_clearing(two, make_store):
    a, b = two
    assert a.put_batch(["a", "b", "c"], [b"v"] * 3) == 0
    assert a.is_exist("a") == 1
    assert a.batch_replica_clear(["a", "b", "none", "b"]) == ["b"]  # there is a lease on a
    assert a.is_exist("b") == 0
    assert b.batch_replica_clear(["c"]) == []  # somebody else wrote it
    assert a.batch_replica_clear(["c"], "nobody:1") == a.batch_replica_clear([]) == []
    assert a.is_exist("c") == 1


def test_clearing_one_segment(make_master, make_store):
    master = make_master("--default_kv_lease_ttl=200")
    a, b = make_store(segment=32 * MIB, at=master), make_store(segment=32 * MIB, at=master)
    assert a.put("two", b"value", config(replica_num=2)) == 0
    put_in(a, "one", b"value")
    other = b.get_hostname()
    wait_until(lambda: a.batch_replica_clear(["two"], other) == ["two"], what="the clearing")
    assert len(where(a, "two")) == 1
    assert a.get("two") == b"value"
    assert a.batch_replica_clear(["one"], other) == []
    wait_until(lambda: a.batch_replica_clear(["one"], a.get_hostname()) == ["one"], what="the clearing")
    assert a.is_exist("one") == 0
