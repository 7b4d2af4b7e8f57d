"""What every metadata back end promises (transfer/metadata/base.py), against the real servers."""

import threading
import time

import pytest

from mooncake.errors import ConfigError, MetadataError
from mooncake.transfer.metadata.backends import Bounded, open_backend
from mooncake.transfer.metadata.base import LARGEST_VALUE
from tests.engine.conftest import timed
from tests.engine.services import start_service
from tests.processes import free_port, wait_until

KEY = "mooncake/rpc_meta/a host:1&x=ü%20#"


@pytest.fixture
def backend(service, cleanup):
    made = service.backend()
    cleanup.callback(made.close)
    return made


def test_changes_are_conditional(backend):
    assert backend.get(KEY) is None
    assert not backend.renew(KEY, b"1") or backend.get(KEY) == b"1"  # other makes of server just write it
    backend.remove(KEY, b"1")
    assert backend.replace(KEY, None, b"1")
    assert backend.get(KEY) == b"1"
    assert not backend.replace(KEY, None, b"2")
    assert not backend.replace(KEY, b"2", b"3")
    assert backend.get(KEY) == b"1"
    assert backend.renew(KEY, b"1")
    assert not backend.renew(KEY, b"2")
    assert backend.replace(KEY, b"1", b"2")
    assert backend.get(KEY) == b"2"
    assert not backend.remove(KEY, b"1")
    assert backend.remove(KEY, b"2")
    assert not backend.remove(KEY, b"2")
    assert backend.get(KEY) is None


def test_put_overwrites(backend):
    for value in (b"1", bytes(range(1, 256)) * 100, b"2"):
        backend.put("mooncake/ram/x", value)
        assert backend.get("mooncake/ram/x") == value
    assert backend.get("mooncake/ram/X") is None


def test_one_of_many_wins(backend):
    won = []

    def run(i):
        if backend.replace(KEY, None, b"%d" % i):
            won.append(i)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [b"%d" % i for i in won] == [backend.get(KEY)]


@pytest.mark.slow
def test_time_to_live(service):
    if not service.forgets:
        pytest.skip("this server keeps entries until they are deleted")
    mine, other = service.backend(2), service.backend(60)
    mine.put("mooncake/ram/short", b"1")
    assert mine.replace("mooncake/rpc_meta/short", None, b"1")
    other.put("mooncake/ram/long", b"2")
    end = time.monotonic() + 3.5
    while time.monotonic() < end:
        assert mine.renew("mooncake/ram/short", b"1")
        assert mine.renew("mooncake/rpc_meta/short", b"1")
        time.sleep(0.3)
    wait_until(lambda: mine.get("mooncake/rpc_meta/short") is None, 8, "the end of an entry that nobody renews")
    wait_until(lambda: mine.get("mooncake/ram/short") is None, 2, "the end of the other")
    assert not mine.renew("mooncake/rpc_meta/short", b"1")
    assert other.get("mooncake/ram/long") == b"2"
    assert mine.replace("mooncake/rpc_meta/short", None, b"2")  # also if a lease has ended meanwhile
    mine.put("mooncake/ram/short", b"2")
    assert mine.renew("mooncake/ram/short", b"2")


def test_huge_values_are_not_taken_in(service, backend):
    try:
        backend.put("mooncake/ram/huge", b"x" * (LARGEST_VALUE + 100))
    except MetadataError:
        assert service.backend().get("mooncake/ram/huge") is None
    else:
        with pytest.raises(MetadataError, match="more than 1048576 bytes"):
            backend.get("mooncake/ram/huge")


@pytest.mark.slow
def test_a_service_that_is_gone_or_stopped(service, backend, cleanup):
    backend.put("mooncake/ram/x", b"1")
    service.freeze()
    cleanup.callback(service.thaw)
    with pytest.raises(MetadataError):
        backend.get("mooncake/ram/x")
    reason, took = timed(refused, backend)
    assert "a moment ago" in reason
    assert took < 0.1
    service.thaw()
    assert wait_until(lambda: _try(backend.get, "mooncake/ram/x"), 8) == b"1"
    service.kill()
    _, took = timed(refused, backend)
    assert took < 2
    service.start()
    wait_until(lambda: _try(backend.replace, "mooncake/rpc_meta/x", None, b"1"), 8)
    assert backend.get("mooncake/ram/x") is None
    assert _calls() == 0


def refused(backend) -> str:
    """Why a call fails."""
    with pytest.raises(MetadataError) as failed:
        backend.get("mooncake/ram/x")
    return str(failed.value)


def _try(call, *args):
    try:
        return call(*args)
    except MetadataError:
        return None


def _calls() -> int:
    """Calls that were given up and go on."""
    names = [thread.name for thread in threading.enumerate()]
    return wait_until(lambda: not sum("metadata-call" in name for name in names), 5) and 0


def test_a_member_that_is_gone(cleanup, tmp_path):
    service = start_service("etcd", tmp_path)
    cleanup.callback(service.close)
    backend = open_backend(f"127.0.0.1:{free_port()};{service.address.removeprefix('etcd://')}", 60)
    assert backend.replace(KEY, None, b"1")
    assert backend.get(KEY) == b"1"


def test_settings_of_redis(cleanup, tmp_path, monkeypatch):
    service = start_service("redis", tmp_path)
    cleanup.callback(service.close)
    service.backend().put("x", b"1")
    bare = f"redis://127.0.0.1:{service.port}"
    with pytest.raises(MetadataError, match="redis at 127"):
        open_backend(bare, 60).get("x")
    monkeypatch.setenv("MC_REDIS_PASSWORD", "a secret")
    assert open_backend(bare, 60).get("x") is None
    monkeypatch.setenv("MC_REDIS_DB_INDEX", "3")
    assert open_backend(bare, 60).get("x") == b"1"
    assert open_backend(f"{bare}/4", 60).get("x") is None
    monkeypatch.setenv("MC_REDIS_USERNAME", "default")
    assert open_backend(bare, 60).get("x") == b"1"
    monkeypatch.setenv("MC_REDIS_USERNAME", "nobody")
    with pytest.raises(MetadataError) as failed:
        open_backend(f"redis://:wrong@127.0.0.1:{service.port}", 60).get("x")
    assert ":wrong@" not in str(failed.value)


@pytest.mark.parametrize(
    "address",
    [
        "gopher://127.0.0.1:1",
        "http://",
        "http://:80/metadata",
        "http://127.0.0.1:many/metadata",
        "http://user:word@127.0.0.1/metadata",
        "http://127.0.0.1/metadata?key=x",
        "http://[::1/metadata",
        "etcd://",
        "etcd://;",
        "127.0.0.1:0",
        "127.0.0.1:65536",
        "redis://",
        "redis://127.0.0.1:many",
        "redis://127.0.0.1:1/first",
    ],
)
def test_addresses_that_are_none(address):
    with pytest.raises(ConfigError) as failed:
        open_backend(address, 60)
    assert "expected" in str(failed.value) or "is not a HOST:PORT" in str(failed.value)


class TestBounded:
    """The limit of a call's time."""

    class Slow:
        def __init__(self) -> None:
            self.go_on = threading.Event()
            self.calls = 0

        def get(self, key):
            self.calls += 1
            self.go_on.wait(20)
            return b"late"

    def test_gives_up(self):
        slow = self.Slow()
        bounded = Bounded(slow, 0.6)
        reason, took = timed(refused, bounded)
        assert "within" in reason
        assert 0.5 < took < 2
        _, took = timed(refused, bounded)
        assert took < 0.3
        assert slow.calls == 1
        slow.go_on.set()
        assert wait_until(lambda: _try(bounded.get, "x"), 3) == b"late"

    def test_programming_errors_come_through(self):
        with pytest.raises(AttributeError):
            Bounded(object(), 1).get("x")
