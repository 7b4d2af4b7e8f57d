import pytest

from tests.events.subscriber import Subscriber
from tests.processes import free_port


@pytest.fixture
def make_publisher(make_master):
    """(master, endpoint): a master that publishes its events there."""

    def make(*flags: str):
        endpoint = f"tcp://127.0.0.1:{free_port()}"
        master = make_master(
            "--enable_kv_events", f"--kv_events_bind_endpoint={endpoint}", "--kv_events_backend_id=pool-1", *flags
        )
        return master, endpoint

    return make


@pytest.fixture
def make_replaying(make_publisher):
    """(master, endpoint, replay endpoint): one that sends again what was missed."""

    def make(*flags: str):
        replay = f"tcp://127.0.0.1:{free_port()}"
        return *make_publisher(f"--kv_events_replay_endpoint={replay}", *flags), replay

    return make


@pytest.fixture
def subscribe(cleanup):
    def make(endpoint: str) -> Subscriber:
        subscriber = Subscriber(endpoint)
        cleanup.callback(subscriber.close)
        return subscriber

    return make
