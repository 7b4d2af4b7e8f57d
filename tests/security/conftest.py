"""Fixtures: authorities, and what processes speak."""

import pytest

from tests.processes import Worker
from tests.security.authority import Authority
from tests.ssd.conftest import disk, make_disk_store, make_disk_worker

__all__ = ["disk", "make_disk_store", "make_disk_worker"]

NAMES = ("MOONCAKE_TLS_CERT", "MOONCAKE_TLS_KEY", "MOONCAKE_TLS_CA")


@pytest.fixture(scope="session")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="session")
def foreign(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("foreign"), "foreign")


@pytest.fixture(scope="session")
def issued(authority):
    return authority.issue()


@pytest.fixture(scope="session")
def issued_elsewhere(foreign):
    return foreign.issue()


class Speaks:
    """What this process, and those that it starts, speak from now on."""

    def __init__(self, monkeypatch, authority, issued, foreign, issued_elsewhere):
        self._patch = monkeypatch
        self.variables = {
            "tls": authority.variables(*issued),
            "plain": dict.fromkeys(NAMES, ""),
            "foreign": foreign.variables(*issued_elsewhere),
        }

    def __call__(self, kind: str) -> None:
        for name, path in self.variables[kind].items():
            self._patch.setenv(name, path)


@pytest.fixture
def speaks(monkeypatch, authority, issued, foreign, issued_elsewhere):
    return Speaks(monkeypatch, authority, issued, foreign, issued_elsewhere)


@pytest.fixture
def encrypted(speaks):
    speaks("tls")


@pytest.fixture
def elsewhere(speaks, cleanup):
    """Runs code in a process that speaks something."""

    def run(kind: str, code: str, **names):
        worker = Worker(env=speaks.variables[kind])
        cleanup.callback(worker.close)
        return worker(code, **names)

    return run
