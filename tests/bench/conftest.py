import pytest

from tests.bench.commands import Command
from tests.proxy.processes import Engine


@pytest.fixture
def bench(cleanup):
    """Starts `mooncake bench` with the given arguments."""

    def start(*arguments, **options) -> Command:
        command = Command(*arguments, **options)
        cleanup.callback(command.close)
        return command

    return start


@pytest.fixture(scope="module")
def shared_engine():
    engine = Engine()
    yield engine
    engine.stop()


@pytest.fixture
def engine(shared_engine):
    """A stub engine without faults; a test must not kill it."""
    assert shared_engine.is_unharmed()
    return shared_engine
