"""Fixtures: the vLLM environment, its zygote, a tiny model, and servers that are gone when their module is over."""

import subprocess
from contextlib import ExitStack, contextmanager

import pytest

from mooncake.cli.engine_settings import own_store_config, pool_environment, transfer_config
from mooncake.cli.loopback import free_ports
from tests.e2e.deployment import start_pool
from tests.e2e.servers import HERE, Server, Zygote, vllm_python
from tests.e2e.up import Up


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
def pool(cleanup, tmp_path):
    return start_pool(cleanup, tmp_path)


@pytest.fixture
def up():
    """Starts `mooncake up` with 64 MB and the given arguments."""
    with ExitStack() as stack:

        def start(*arguments: str) -> Up:
            pool = Up(*arguments)
            stack.callback(pool.close)
            return pool

        yield start


@contextmanager
def starting(zygote, model, folder, settings_of):
    """Starts servers at once, by name and role: `start(pool, a="kv_both", plain=None)`.  A role of None has no
    connector, the others have what settings_of(role, pool) says."""
    with ExitStack() as stack:

        def start(pool, **roles):
            servers = []
            for name, role in roles.items():
                servers.append(Server(zygote, name, model, folder, *(settings_of(role, pool) if role else ())))
                stack.callback(servers[-1].stop)
            for server in servers:
                server.wait_ready()
            return servers

        yield start


@pytest.fixture
def start_own(zygote, model, tmp_path):
    """With this package's own connector; a role may be its whole configuration, JSON text."""

    def settings_of(role, pool):
        # On a busy machine loads of a tiny model are at times slower than computing: they are made all the same.
        transfer = role if role.startswith("{") else own_store_config(role, decline_slow_loads=False)
        more = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_LOGGING_LEVEL": "DEBUG"}
        return transfer, {**pool_environment(pool.config), **more}

    with starting(zygote, model, tmp_path, settings_of) as start:
        yield start


@pytest.fixture
def start(zygote, model, tmp_path):
    """With vLLM's own connector."""

    def settings_of(role, pool):
        return transfer_config(free_ports(1)[0], role), pool_environment(pool.config)

    with starting(zygote, model, tmp_path, settings_of) as start:
        yield start


@pytest.fixture(params=["start", "start_own"], ids=["vLLM's", "own"])
def start_either(request):
    return request.getfixturevalue(request.param)
