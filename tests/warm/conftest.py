"""Fixtures: engines whose segment servers linger, and a check that nothing of them is left."""

import pytest

from mooncake.transfer.warm_sockets import waiting
from tests.processes import gone, wait_until

MIB = 1 << 20
SEGMENT = 48 * MIB


@pytest.fixture
def linger(monkeypatch):
    """Engines that are started from now on leave their segment servers for so many seconds."""

    def set_to(seconds: int) -> None:
        monkeypatch.setenv("MOONCAKE_SEGMENT_LINGER_S", str(seconds))

    set_to(60)
    return set_to


@pytest.fixture
def ended(cleanup):
    """Has servers that a test leaves behind ended."""

    def end() -> None:
        from mooncake.cli.warm import _find
        from mooncake.rpc.serving_messages import Stop

        for server in _find():
            server.connection.call(Stop())
            server.connection.close()
            wait_until(lambda pid=server.says.pid: gone(pid), what="the server's end")
        assert waiting("") == []

    cleanup.callback(end)
