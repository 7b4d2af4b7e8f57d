"""Fixtures: a back end for elections, and masters that stand for election in it."""

import pytest

from tests.ha.backends import KINDS, Backend
from tests.ha.pool import Pool


@pytest.fixture
def make_backend(cleanup, tmp_path, monkeypatch):
    def make(kind: str) -> Backend:
        made = Backend(kind, tmp_path)
        cleanup.callback(made.service.close)
        for name, value in made.environment.items():
            monkeypatch.setenv(name, value)
        return made

    return make


@pytest.fixture(params=[pytest.param(kind, marks=() if kind == "redis" else pytest.mark.slow) for kind in KINDS])
def backend(request, make_backend):
    """One of each kind."""
    return make_backend(request.param)


@pytest.fixture
def make_pool(cleanup, tmp_path):
    """Masters of one cluster, of which one leads already."""

    def make(backend: Backend, masters: int = 2, *flags: str) -> Pool:
        pool = Pool(backend, tmp_path)
        cleanup.callback(pool.stop)
        for _ in range(masters):
            pool.add_master(*flags)
        if masters:
            pool.leader()
        return pool

    return make
