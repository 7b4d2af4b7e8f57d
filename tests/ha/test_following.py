"""Others that follow the leader: the indexer, the doctor, clients of a name that leads elsewhere by now."""

import json
import subprocess
import sys
import time

import pytest

from mooncake.store import MooncakeDistributedStore
from tests.events.indexer import Conductor
from tests.events.test_indexer import PROMPT, sequence_hashes
from tests.ha.pool import health
from tests.processes import BIN, Master, Worker, free_port, wait_until

MIB = 1 << 20


@pytest.mark.slow
def test_the_indexer_hears_the_new_leader(make_backend, make_pool, make_store, cleanup):
    """It is told of all masters once."""
    pool = make_pool(make_backend("redis"), 0)
    endpoints = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
    for endpoint in endpoints:
        pool.add_master("--enable_kv_events", f"--kv_events_bind_endpoint={endpoint}", "--kv_events_backend_id=p")
    conductor = Conductor()
    cleanup.callback(conductor.stop)
    conductor.register("pool", ",".join(endpoints))
    wait_until(lambda: conductor.instance("pool")["connected"])

    store = MooncakeDistributedStore()
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", 16 * MIB, MIB, "tcp", "", pool.backend.address) == 0
    cleanup.callback(store.close)
    keys = [str(one) for one in sequence_hashes(PROMPT, 4)]
    assert store.put_batch(keys[:3], [b"x"] * 3) == 0
    conductor.wait_longest(PROMPT, {"pool": 12})
    leader = pool.leader()
    leader.kill()
    killed = time.monotonic()
    wait_until(lambda: store.put(keys[3], b"x") == 0, 10, "a put")
    wait_until(lambda: conductor.longest(PROMPT) == {"pool": 16}, 10, "the index")
    assert time.monotonic() - killed < 10


def examine(address: str) -> dict:
    argv = [BIN / "mooncake", "doctor", "--master", address, "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    return {one["subject"]: (one["status"], one["text"]) for one in json.loads(done.stdout)["findings"]}


@pytest.mark.slow
def test_the_doctor(make_backend, make_pool):
    backend = make_backend("redis")
    shown = backend.address.replace("a%20secret", "***")
    found = examine(backend.address)
    assert found[f"master {shown}"] == (
        "fail",
        "nobody leads now; is a mooncake_master with --enable_ha running for this cluster?",
    )
    pool = make_pool(backend)
    leader = pool.leader()
    found = examine(backend.address)
    assert found[f"master {shown}"] == ("ok", f"{leader.address} leads")
    status, text = found[f"master {leader.address}"]
    assert status == "ok"
    assert f"term {health(leader)['view_version']}" in text
    status, text = examine(pool.standby().address)[f"master {pool.standby().address}"]
    assert (status, text.startswith("this master is a standby")) == ("fail", True)


@pytest.mark.slow
def test_a_name_that_leads_elsewhere(cleanup, tmp_path):
    """The master comes back at another address behind it; clients and their segments find it there."""
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n127.0.0.1 the-master.test\n")
    unshare = ["unshare", "--mount", "sh", "-ec", f'mount --bind {hosts} /etc/hosts; exec "$@"', "sh"]
    if subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no mount namespace can be made here")
    master = Master()
    cleanup.callback(master.stop)
    worker = Worker(prefix=unshare, python=sys.executable)
    cleanup.callback(worker.close)
    setup = """
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
result = store.setup("127.0.0.1", "P2PHANDSHAKE", 16 << 20, 1 << 20, "tcp", "", address)
"""
    assert worker(setup, address=f"the-master.test:{master.port}") == 0
    assert worker("result = store.put('k', b'v')") == 0
    master.kill()
    master.host = "127.0.0.2"
    master.start()
    with hosts.open("r+") as file:  # the same file: it is mounted
        file.write("127.0.0.1 localhost\n127.0.0.2 the-master.test\n")
        file.truncate()
    wait_until(lambda: worker("result = store.get('k') == b'v'"), 10, "the value at the new address")
