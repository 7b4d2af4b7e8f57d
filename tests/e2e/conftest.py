"""Fixtures: the vLLM environment, its zygote, a tiny model, and servers that are gone when their module is over."""

import subprocess
from contextlib import ExitStack

import pytest

from mooncake.cli.engine_settings import own_transfer_config, write_pool_config
from tests.e2e.servers import HERE, Server, Zygote, vllm_python
from tests.e2e.up import Up
from tests.processes import Master

SEGMENT_SIZE = 64 << 20  # bytes that each instance gives to the pool


@pytest.fixture(scope="session")
def python():
    found = vllm_python()
    if found is None:
        pytest.skip("there is no vLLM environment; `scripts/install --vllm` makes it")
    return found


@pytest.fixture(scope="session")
def zygote(python, tmp_path_factory):
    zygote = Zygote(python, tmp_path_factory.mktemp("zygote") / "zygote.log")
    yield zygote
    zygote.close()


@pytest.fixture(scope="session")
def model(python, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    subprocess.run([python, HERE / "tiny_model.py", folder], check=True)
    return folder


@pytest.fixture
def pool(tmp_path):
    """A master; its `config` is the file that engines read."""
    master = Master()
    master.config = tmp_path / "pool.json"
    write_pool_config(master.config, master.port, SEGMENT_SIZE)
    yield master
    master.stop()


@pytest.fixture
def up():
    """Starts `mooncake up` with 64 MB and the given arguments."""
    with ExitStack() as stack:

        def start(*arguments: str) -> Up:
            pool = Up(*arguments)
            stack.callback(pool.close)
            return pool

        yield start


@pytest.fixture
def start_own(zygote, model, tmp_path):
    """As `start`, with this package's own connector; a role may be its whole configuration, JSON text."""
    with ExitStack() as stack:

        def start(pool, **roles):
            servers = []
            for name, role in roles.items():
                transfer = role if role is None or role.startswith("{") else own_transfer_config(role)
                config = pool.config if role else None
                servers.append(Server(zygote, name, model, tmp_path, config, role, transfer))
                stack.callback(servers[-1].stop)
            for server in servers:
                server.wait_ready()
            return servers

        yield start


@pytest.fixture
def start(zygote, model, tmp_path):
    """Starts servers at once, by name: `start(pool, a="kv_both", plain=None)`; a role of None has no connector."""
    with ExitStack() as stack:

        def start(pool, **roles):
            servers = []
            for name, role in roles.items():
                servers.append(Server(zygote, name, model, tmp_path, pool.config if role else None, role))
                stack.callback(servers[-1].stop)
            for server in servers:
                server.wait_ready()
            return servers

        yield start
