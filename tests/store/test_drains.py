"""Drain jobs over HTTP, with real segment servers: nothing is lost, and what the job says is true."""

import os
import signal

import pytest

from mooncake.store import MooncakeDistributedStore, ReplicateConfig
from tests.processes import children, stop, wait_until

MIB = 1 << 20
ENDED = ("SUCCEEDED", "FAILED", "CANCELED")


def drain(master, *names: str, **wanted) -> str:
    """The id of a new job."""
    status, answer = master.ask("POST", "/api/v1/drain_jobs", {"segments": list(names), **wanted})
    assert (status, answer["success"], answer["status"]) == (200, True, "CREATED"), answer
    return answer["job_id"]


def state(master, job: str) -> dict:
    status, answer = master.ask("GET", f"/api/v1/drain_jobs/query?job_id={job}")
    assert (status, answer["success"], answer["job_id"]) == (200, True, job)
    return answer


def end_of(master, job: str, limit: float = 30) -> dict:
    wait_until(lambda: state(master, job)["status_name"] in ENDED, limit, "the end of the job")
    return state(master, job)


def status_of(master, store) -> tuple[int, str]:
    _, answer = master.ask("GET", f"/api/v1/segments/status?segment={store.get_hostname()}")
    return answer["status"], answer["status_name"]


def put_in(store, segment, key: str, value: bytes, **settings) -> None:
    config = ReplicateConfig()
    config.preferred_segment = segment.get_hostname()
    for name, setting in settings.items():
        setattr(config, name, setting)
    assert store.put(key, value, config) == 0


def holders(store, key: str) -> list[str]:
    return [
        replica.get_memory_descriptor().buffer_descriptor.transport_endpoint
        for replica in store.get_replica_desc(key)
        if replica.is_memory_replica()
    ]


def server_of(store) -> int:
    """The process that serves the segment of a store of ours."""
    return store._client._session.server.pid


@pytest.fixture
def master(make_master):
    master = make_master()
    master.get("/health")
    return master


@pytest.fixture
def reader(make_store):
    """A store without memory of its own."""
    return make_store(segment=0)


def test_everything_moves_and_the_segment_can_go(master, make_store, reader):
    a, b = make_store(segment=32 * MIB), make_store(segment=64 * MIB)
    values = {f"k{i}": bytes([i % 256]) * (1000 + 999 * i) for i in range(150)}
    for key, value in values.items():
        put_in(reader, a, key, value)
    put_in(reader, a, "hard", b"h" * MIB, with_hard_pin=True)
    put_in(reader, a, "grouped", b"g" * MIB, group_ids=["g"])
    put_in(reader, a, "twice", b"t" * MIB, replica_num=2)
    values |= {"hard": b"h" * MIB, "grouped": b"g" * MIB, "twice": b"t" * MIB}
    assert reader.is_exist("k0") == 1  # a leased one moves too
    job = drain(master, a.get_hostname())
    done = end_of(master, job)
    assert (done["status_name"], done["status"], done["type_name"]) == ("SUCCEEDED", 3, "DRAIN"), done
    assert done["segments"] == [a.get_hostname()]
    assert (done["succeeded_units"], done["failed_units"], done["blocked_units"], done["active_units"]) == (
        153,
        0,
        0,
        0,
    )
    assert done["migrated_bytes"] == sum(map(len, values.values()))
    assert done["last_updated_at_ms_epoch"] >= done["created_at_ms_epoch"] > 1 << 40
    assert status_of(master, a) == (3, "DRAINED")
    put_in(reader, a, "new", b"n")  # is placed where there is room for new values
    assert master.metric("mooncake_drain_moved_total") == 153
    assert master.metric("mooncake_drain_jobs") == 0
    a.close()
    assert {key: reader.get(key) for key in values} == values
    assert reader.get("new") == b"n"
    assert status_of(master, b) == (1, "OK")


def test_a_value_with_parts_in_both_segments(master, make_store, reader):
    """Of two segments the one can be drained though the other has a part of the value already."""
    a, b = make_store(segment=32 * MIB), make_store(segment=32 * MIB)
    for segment, key in ((a, "in-a"), (b, "in-b")):
        put_in(reader, segment, key, bytes(24 * MIB), with_hard_pin=True)
    value = os.urandom(12 * MIB)
    assert reader.put("k", value) == 0  # fits neither
    assert [reader.remove(key, True) for key in ("in-a", "in-b")] == [0, 0]
    done = end_of(master, drain(master, a.get_hostname()))
    assert (done["status_name"], done["succeeded_units"], done["migrated_bytes"]) == ("SUCCEEDED", 1, 12 * MIB)
    a.close()
    assert reader.get("k") == value


def test_what_can_be_asked(master, make_store):
    a, b = make_store(segment=16 * MIB), make_store(segment=16 * MIB)
    route, name = "/api/v1/drain_jobs", a.get_hostname()
    for body, status, code in (
        ({}, 400, -600),
        ({"segments": []}, 400, -600),
        ({"segments": "a"}, 400, -600),
        ({"segments": [name], "max_concurrency": 0}, 400, -600),
        ({"segments": [name], "target_segments": [name]}, 400, -600),
        ({"segments": ["none:1"]}, 404, -101),
        ({"segments": [name], "target_segments": ["none:1"]}, 404, -101),
    ):
        got, answer = master.ask("POST", route, body)
        assert (got, answer["success"], answer["error_code"]) == (status, False, code), body
    job = drain(master, name, target_segments=[b.get_hostname()], max_concurrency=1)
    assert end_of(master, job)["status_name"] == "SUCCEEDED"
    assert master.ask("POST", route, {"segments": [name]})[1]["error_code"] == -1010
    status, answer = master.ask("POST", f"{route}/cancel?job_id={job}")
    assert (status, answer["error_code"]) == (409, -1010)
    task = a.put("k", b"v"), a.create_copy_task("k", [name])
    assert task == (0, ((0, 0), -1010))


def test_a_canceled_segment_serves_again(master, make_store, reader):
    a = make_store(segment=32 * MIB)
    b = make_store(segment=32 * MIB)
    for i in range(20):
        put_in(reader, a, f"k{i}", bytes([i]) * MIB)
    stop(server_of(b))  # whatever moves there waits
    job = drain(master, a.get_hostname(), max_concurrency=2)
    wait_until(lambda: state(master, job)["active_units"] == 2, what="the first moves")
    assert status_of(master, a) == (2, "DRAINING")
    status, answer = master.ask("POST", f"/api/v1/drain_jobs/cancel?job_id={job}")
    assert (status, answer) == (
        200,
        {"success": True, "job_id": job, "status": "CANCELED", "error_code": 0, "error_message": ""},
    )
    assert state(master, job)["status_name"] == "CANCELED"
    assert status_of(master, a) == (1, "OK")
    put_in(reader, a, "new", b"n")
    assert holders(reader, "new") == holders(reader, "k19")
    os.kill(server_of(b), signal.SIGCONT)
    assert all(reader.get(f"k{i}") == bytes([i]) * MIB for i in range(20))


@pytest.mark.slow
def test_too_little_room_elsewhere(master, make_store, reader):
    a, _ = make_store(segment=32 * MIB), make_store(segment=8 * MIB)
    pinned = {"with_hard_pin": True}
    for i in range(20):
        put_in(reader, a, f"k{i}", bytes([i]) * MIB, **pinned)
    job = drain(master, a.get_hostname())
    done = end_of(master, job)
    assert done["status_name"] == "FAILED"
    assert done["succeeded_units"] + done["failed_units"] == 20
    assert done["failed_units"] >= 12
    assert "values could not leave" in done["message"]
    assert status_of(master, a) == (1, "OK")
    assert all(reader.get(f"k{i}") == bytes([i]) * MIB for i in range(20))


@pytest.mark.slow
def test_what_fits_nowhere_stays_on_disk(make_master, tmp_path, cleanup):
    master = make_master("--enable_offload", "--offload_on_evict")
    disk = tmp_path / "ssd"
    disk.mkdir()
    a, b = MooncakeDistributedStore(), MooncakeDistributedStore()
    arguments = ("127.0.0.1", "P2PHANDSHAKE", 32 * MIB, 64 * MIB, "tcp", "", master.address)
    for store, more in ((a, (None, True, str(disk))), (b, ())):
        assert store.setup(*arguments[:2], 32 * MIB if more else 8 * MIB, *arguments[3:], *more) == 0
        cleanup.callback(store.close)
    wait_until(lambda: master.metric("mooncake_disk_tiers") == 1, what="the tier")
    for i in range(20):
        put_in(b, a, f"k{i}", bytes([i]) * MIB, with_hard_pin=True)
    done = end_of(master, drain(master, a.get_hostname()))
    assert done["status_name"] == "SUCCEEDED", done
    assert done["succeeded_units"] == 20
    assert "only on disk" in done["message"]
    assert all(b.get(f"k{i}") == bytes([i]) * MIB for i in range(20))
    assert float(master.get(f"/query_segment?segment={a.get_hostname()}").split("\n")[1].split()[1]) == 0


@pytest.mark.slow
def test_the_owner_is_killed_in_the_middle(master, make_store, make_worker, reader):
    worker = make_worker(segment=64 * MIB)
    b = make_store(segment=64 * MIB)
    name = worker("result = store.get_hostname()")
    config = ReplicateConfig()
    config.preferred_segment = name
    for i in range(40):
        assert reader.put(f"k{i}", bytes([i]) * MIB, config) == 0
    stop(server_of(b))  # so that it is the middle
    job = drain(master, name)
    wait_until(lambda: state(master, job)["active_units"] == 4, what="the first moves")
    (server,) = children(worker.pid)
    worker.kill()
    os.kill(server, signal.SIGKILL)
    os.kill(server_of(b), signal.SIGCONT)
    done = end_of(master, job)
    assert done["status_name"] == "FAILED"
    assert f"segment {name} was lost" in done["message"]
    for i in range(40):
        assert reader.get(f"k{i}") in (b"", bytes([i]) * MIB)


def test_a_target_is_killed_in_the_middle(master, make_store, make_worker, reader):
    a, worker, _ = make_store(segment=64 * MIB), make_worker(segment=128 * MIB), make_store(segment=64 * MIB)
    for i in range(30):
        put_in(reader, a, f"k{i}", bytes([i]) * MIB)
    (server,) = children(worker.pid)
    stop(server)
    job = drain(master, a.get_hostname())
    wait_until(lambda: state(master, job)["active_units"] == 4, what="the first moves")
    worker.kill()
    os.kill(server, signal.SIGKILL)
    done = end_of(master, job)
    assert (done["status_name"], done["succeeded_units"]) == ("SUCCEEDED", 30), done
    a.close()
    assert all(reader.get(f"k{i}") == bytes([i]) * MIB for i in range(30))


@pytest.mark.slow
def test_puts_go_on_meanwhile(master, make_store, make_worker, reader):
    a, _ = make_store(segment=64 * MIB), make_store(segment=64 * MIB)
    worker = make_worker()
    worker(
        """
import threading
codes, stop = set(), threading.Event()
def run():
    i = 0
    while not stop.is_set():
        i += 1
        codes.add(store.put(f"w{i % 50}", bytes([i % 50]) * 300_000))
        if i % 3 == 0: store.remove(f"w{i % 7}", force=True)
        if i % 5 == 0: codes.add(store.upsert(f"w{i % 50}", bytes([i % 50]) * 300_000))
thread = threading.Thread(target=run); thread.start()
result = 0
"""
    )
    for i in range(30):
        put_in(reader, a, f"k{i}", bytes([i]) * MIB)
    done = end_of(master, drain(master, a.get_hostname(), max_concurrency=8))
    assert done["status_name"] == "SUCCEEDED", done
    codes = worker("stop.set(); thread.join(); result = sorted(codes)")
    assert set(codes) <= {0, -708, -200}, codes
    a.close()
    assert all(reader.get(f"k{i}") == bytes([i]) * MIB for i in range(30))
    there = [i for i in range(50) if reader.is_exist(f"w{i}")]
    assert there
    assert all(reader.get(f"w{i}") == bytes([i]) * 300_000 for i in there)


def job_of(master, job: str) -> str:
    """Its state, or "" if this master does not know it (yet)."""
    status, answer = master.ask("GET", f"/api/v1/drain_jobs/query?job_id={job}")
    return answer["status_name"] if status == 200 else ""


def test_a_job_goes_on_under_a_new_master(master, make_store, reader):
    """Of two segments, the one half empty; afterwards both are as the job promised, also under a third master."""
    a, more = make_store(segment=16 * MIB), make_store(segment=16 * MIB)
    b = make_store(segment=64 * MIB)
    for i in range(20):
        put_in(reader, (a, more)[i % 2], f"k{i}", bytes([i]) * MIB)
    stop(server_of(b))  # whatever moves there waits
    job = drain(master, a.get_hostname(), more.get_hostname(), max_concurrency=2)
    wait_until(lambda: state(master, job)["active_units"] == 2, what="the first moves")
    master.kill()
    os.kill(server_of(b), signal.SIGCONT)
    master.start()
    wait_until(lambda: job_of(master, job) == "SUCCEEDED", 40, "the end of the job")
    assert state(master, job)["segments"] == [a.get_hostname(), more.get_hostname()]
    assert "earlier master" in state(master, job)["message"]
    assert state(master, job)["succeeded_units"] >= 2
    assert len({tuple(holders(reader, f"k{i}")) for i in range(20)}) == 1
    assert all(reader.get(f"k{i}") == bytes([i]) * MIB for i in range(20))
    master.kill()
    master.start()
    wait_until(lambda: job_of(master, job) == "SUCCEEDED", 40, "the job")
    wait_until(lambda: [status_of(master, one)[1] for one in (a, more)] == ["DRAINED", "DRAINED"], what="both")
    a.close()
    more.close()
    assert all(reader.get(f"k{i}") == bytes([i]) * MIB for i in range(20))


def test_a_canceled_job_does_not_come_back(master, make_store, reader):
    a, b = make_store(segment=16 * MIB), make_store(segment=16 * MIB)
    put_in(reader, a, "k", b"v" * MIB)
    stop(server_of(b))
    job = drain(master, a.get_hostname())
    wait_until(lambda: state(master, job)["active_units"] == 1, what="the move")
    assert master.ask("POST", f"/api/v1/drain_jobs/cancel?job_id={job}")[0] == 200
    master.kill()
    os.kill(server_of(b), signal.SIGCONT)
    master.start()
    wait_until(lambda: reader.get("k") == b"v" * MIB, what="the value")
    wait_until(lambda: status_of(master, a)[1] == "OK", what="the segment")
    assert job_of(master, job) == ""
