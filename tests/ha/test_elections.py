"""Elections alone: who wins, with which term, and what ends it, in each kind of back end."""

import json
import threading
import time

import pytest

from mooncake.election.addresses import open_election
from mooncake.election.base import LEASE_S, TERM_STEP, View
from mooncake.election.leader import LeaderPlace
from mooncake.election.places import master_place
from mooncake.errors import ConfigError, MetadataError
from tests.ha.kubernetes_api import KubernetesApi
from tests.processes import wait_until


def test_one_of_many_wins(backend):
    elections = [open_election(backend.address) for _ in range(8)]
    outcomes = [None] * len(elections)

    def stand(i: int) -> None:
        outcomes[i] = elections[i].stand(f"10.0.0.{i}:50051")

    threads = [threading.Thread(target=stand, args=(i,)) for i in range(len(elections))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    won = [outcome.view for outcome in outcomes if outcome.won]
    assert len(won) == 1
    for election in elections:
        assert election.look() == won[0]
        again = election.stand("10.0.0.9:1")
        assert (again.view, again.won) == (won[0], False)


@pytest.mark.slow
def test_the_life_of_a_leader(backend):
    first, second = (open_election(backend.address) for _ in range(2))
    assert first.look() is None
    view, won = first.stand("a:1")
    assert won
    assert view.address == "a:1"
    assert abs(view.term - time.time() * 1000) < 60_000
    until = time.monotonic() + 1.5 * LEASE_S
    while time.monotonic() < until:  # others stand all the time, as standbys do
        assert second.stand("b:2").won is False
        assert first.renew(view)
        time.sleep(0.5)
    asked = time.monotonic()
    later = wait_until(lambda: (outcome := second.stand("b:2")).won and outcome.view, LEASE_S + 2, "the takeover")
    assert time.monotonic() - asked > LEASE_S - 0.6, "the last renewal is up to half a second older than `asked`"
    assert later.term >= view.term + TERM_STEP
    assert first.renew(view) is False
    first.resign(view, later.term + 10**9)  # it is too late for that, and harms nobody
    assert second.look() == later
    assert second.renew(later)


def test_who_resigns_is_followed_at_once(backend):
    first, second = (open_election(backend.address) for _ in range(2))
    view, _ = first.stand("a:1")
    heard = view.term + 10**9
    first.resign(view, heard)
    assert second.look() is None
    assert not first.renew(view)
    later, won = second.stand("b:2")
    assert won
    assert later.term > heard


def test_a_leader_whose_address_is_the_former_ones(backend):
    """Restarted on the same port within the lease: the entry is not its own."""
    former, restarted = (open_election(backend.address) for _ in range(2))
    view, _ = former.stand("a:1")
    assert restarted.stand("a:1").won is False
    assert restarted.renew(View("a:1", view.term + 1)) is False


def test_clusters_are_apart(make_backend):
    address = make_backend("redis").address
    assert open_election(address, "one").stand("a:1").won
    assert open_election(f"{address}?cluster_id=two").stand("b:2").won
    assert open_election(address).look() is None
    assert LeaderPlace(f"{address}?cluster_id=one").find() == ("a", 1)


def test_the_cluster_of_the_environment(make_backend, monkeypatch):
    address = make_backend("redis").address
    open_election(address, "staging").stand("a:1")
    monkeypatch.setenv("MC_STORE_CLUSTER_ID", "staging")
    assert master_place(address).find() == ("a", 1)


_IN_REDIS = "mooncake-store/{mooncake_cluster}/master_view"


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("redis", [_IN_REDIS, f"{_IN_REDIS}_version"]),
        pytest.param("etcd", ["mooncake-store/mooncake_cluster/master_view"], marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_the_published_keys(make_backend, kind, keys):
    """Tools of the C++ pool look there; etcd's own revision is its version."""
    backend = make_backend(kind)
    view, _ = open_election(backend.address).stand("10.0.0.1:50051")
    direct = backend.service.backend()
    assert direct.get(keys[0]) == b"10.0.0.1:50051"
    for key in keys[1:]:
        assert direct.get(key) == str(view.term).encode()


# ---------------------------------------------------------------- who follows


def test_a_lower_term_is_refused(make_backend):
    place = LeaderPlace(make_backend("redis").address)
    place.accept(10)
    place.accept(11)
    with pytest.raises(ConnectionRefusedError, match="term 10; one of term 11 is known"):
        place.accept(10)


def test_who_led_is_tried_while_the_back_end_is_away(make_backend):
    backend = make_backend("redis")
    open_election(backend.address).stand("10.0.0.1:50051")
    place, fresh = LeaderPlace(backend.address), LeaderPlace(backend.address)
    assert place.find() == ("10.0.0.1", 50051)
    backend.service.kill()
    time.sleep(0.6)
    assert place.find() == ("10.0.0.1", 50051)
    with pytest.raises(ConnectionRefusedError, match=r"redis at 127\.0\.0\.1:\d+ cannot be used"):
        fresh.find()


def test_nobody_leads(make_backend):
    with pytest.raises(ConnectionRefusedError, match="nobody leads now"):
        LeaderPlace(make_backend("redis").address).find()


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("etcd://", "does not say where the master is"),
        ("zookeeper://h:1", "does not say where the master is; expected HOST:PORT, etcd://"),
        ("etcd://h:p", "'h:p' is not a HOST:PORT"),
        ("redis://", "redis://[[USER]:PASSWORD@]HOST"),
        ("redis://h:1?db=3", "db means nothing here"),
        ("k8s://kv", "no API server"),
        ("k8s://kv/Pool_1", "does not say where the master is"),
        ("h", "'h' is not an address"),
        ("redis://:secret@h:1?x=1", "'redis://:***@h:1?x=1'"),
    ],
)
def test_mistakes_in_addresses(text, part, monkeypatch):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ConfigError) as caught:
        master_place(text)
    assert part in str(caught.value)
    assert "secret" not in str(caught.value)


# ---------------------------------------------------------------- Kubernetes


@pytest.fixture
def api(cleanup, monkeypatch):
    made = KubernetesApi(token="of the pod")
    cleanup.callback(made.close)
    monkeypatch.setenv("MOONCAKE_K8S_API_SERVER", made.url)
    return made


@pytest.fixture
def credentials(tmp_path, monkeypatch):
    (tmp_path / "namespace").write_text("of-the-pod\n")
    (tmp_path / "token").write_text("of the pod\n")
    monkeypatch.setenv("MOONCAKE_K8S_CREDENTIALS", str(tmp_path))
    return tmp_path


def test_the_lease_that_is_kept(api, credentials):
    election = open_election("k8s:///pool")
    view, won = election.stand("10.0.0.1:50051")
    assert won
    lease = api.leases["of-the-pod", "pool"]
    assert lease["spec"]["holderIdentity"] == "10.0.0.1:50051"
    assert lease["spec"]["leaseDurationSeconds"] == 5
    assert lease["spec"]["leaseTransitions"] == 0
    assert lease["metadata"]["annotations"] == {"mooncake-store/term": str(view.term)}
    election.resign(view, 0)
    assert open_election("k8s://of-the-pod/pool").stand("b:2").won
    assert api.leases["of-the-pod", "pool"]["spec"]["leaseTransitions"] == 1


def test_a_lease_that_others_made_and_annotated(api, credentials):
    metadata = {"name": "pool", "resourceVersion": "7", "labels": {"team": "kv"}, "annotations": {"note": "ours"}}
    api.leases["kv", "pool"] = json.loads(json.dumps({"metadata": metadata, "spec": {}}))
    assert open_election("k8s://kv/pool").stand("a:1").won
    kept = api.leases["kv", "pool"]["metadata"]
    assert kept["labels"] == {"team": "kv"}
    assert kept["annotations"]["note"] == "ours"


def test_of_two_that_saw_the_same_version_one_wins(api, credentials):
    first, second = open_election("k8s://kv/pool"), open_election("k8s://kv/pool")
    view, _ = first.stand("a:1")
    first.resign(view, 0)
    read = second._read()
    assert first.stand("a:1").won
    assert second._replace(read, {"holderIdentity": "b:2"}, 1) is False
    assert first.look().address == "a:1"


def test_a_new_token_is_used(api, credentials):
    election = open_election("k8s://kv/pool")
    view, _ = election.stand("a:1")
    api.token = "the next one"
    with pytest.raises(MetadataError, match="401 Unauthorized; its service account needs get, create and update"):
        election.renew(view)
    (credentials / "token").write_text("the next one")
    assert election.renew(view)
