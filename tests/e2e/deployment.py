"""Prefill and decode instances of real vLLM behind the real proxy."""

import json
from contextlib import ExitStack
from pathlib import Path

from mooncake.cli.engine_settings import (
    CONSUMER,
    OWN,
    PRODUCER,
    p2p_and_pool_config,
    p2p_config,
    p2p_environment,
    pool_environment,
    write_pool_config,
)
from mooncake.cli.loopback import free_ports
from tests.e2e.servers import Server, Zygote
from tests.processes import Master, wait_until
from tests.proxy.processes import Proxy, http

ABORT_LIMIT = 5  # seconds


SEGMENT_SIZE = 64 << 20  # bytes that each instance gives to a pool


def start_pool(stack: ExitStack, folder: Path) -> Master:
    """A master; its `config` is the file that engines read."""
    master = Master()
    stack.callback(master.stop)
    master.config = folder / "pool.json"
    write_pool_config(master.config, master.port, SEGMENT_SIZE)
    return master


class Deployment:
    """Everything that is started here ends with `stack`."""

    def __init__(self, stack: ExitStack, zygote: Zygote, model: Path, folder: Path, connector: str = OWN) -> None:
        """`connector`: OWN or IN_TREE."""
        self._stack, self._zygote, self._model, self._folder = stack, zygote, model, folder
        self._connector = connector
        self._names: set[str] = set()
        self.prefill: list[Server] = []
        self.decode: list[Server] = []
        self.proxy: Proxy | None = None

    def start(
        self,
        prefill: int = 1,
        decode: int = 1,
        *flags: str,
        pool: Master | None = None,
        pool_first: bool = False,
        workers: int | None = None,
        ranks: tuple[int, int] = (1, 1),
    ) -> "Deployment":
        """Engines, all at once, and the proxy in front of them.

        `flags` are the proxy's; `ranks`: tensor-parallel sizes of prefill and decode.
        """
        roles = ((PRODUCER, prefill, self.prefill, ranks[0]), (CONSUMER, decode, self.decode, ranks[1]))
        for role, count, servers, size in roles:
            for _ in range(count):
                servers.append(self.engine(role, pool, pool_first=pool_first, workers=workers, ranks=size))
        for server in (*self.prefill, *self.decode):
            server.wait_ready()
        self.proxy = Proxy(*flags, prefill=[(one, True) for one in self.prefill], decode=self.decode)
        self._stack.callback(self.proxy.stop)
        return self

    def engine(
        self,
        role: str,
        pool: Master | None = None,
        *,
        pool_first: bool = False,
        workers: int | None = None,
        ranks: int = 1,
    ) -> Server:
        """One instance of MooncakeConnector; with `pool`, also of MooncakeStoreConnector.  Not waited for."""
        bootstrap, lookup = free_ports(2)
        environment = p2p_environment(bootstrap if role == PRODUCER else None, ABORT_LIMIT)
        if pool is None:
            transfer = p2p_config(role, workers, connector=self._connector)
        else:
            environment |= pool_environment(pool.config)
            own = self._connector == OWN
            transfer = p2p_and_pool_config(
                role, lookup, pool_first=pool_first, connector=self._connector, own_store=own
            )
        if ranks == 1:
            return self._server(role, transfer, environment)
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(ranks)))
        parallel = ("--tensor-parallel-size", str(ranks), "--distributed-executor-backend", "mp")
        return self._server(role, transfer, environment, *parallel)

    def failing_decode(self) -> Server:
        """A decode instance with vLLM's own policy for what does not come.  Not waited for."""
        transfer = json.loads(p2p_config(CONSUMER, connector=self._connector))
        del transfer["kv_load_failure_policy"]
        return self._server(CONSUMER, json.dumps(transfer), p2p_environment(None, ABORT_LIMIT))

    def plain(self) -> Server:
        """One instance that computes everything itself.  Not waited for."""
        return self._server("plain", "", {})

    def _server(self, name: str, transfer: str, environment: dict[str, str], *more: str) -> Server:
        name = f"{name}-{len(self._names)}"
        self._names.add(name)
        environment["VLLM_SERVER_DEV_MODE"] = "1"  # for /reset_prefix_cache
        server = Server(self._zygote, name, self._model, self._folder, transfer, environment, *more)
        self._stack.callback(server.stop)
        return server


def forget(*servers: Server) -> None:
    """Make them compute every prompt anew."""
    for server in servers:
        assert http(f"{server.url}/reset_prefix_cache", {})[0] == 200


def from_peer(server: Server) -> float:
    """Prompt tokens that came straight from prefill."""
    return server.metric("vllm:prompt_tokens_cached_by_source_total", source="p2p")


def held(server: Server) -> float:
    """Share of the KV cache that is in use."""
    return server.metric("vllm:kv_cache_usage_perc")


def wait_free(*servers: Server, limit: float) -> None:
    """Until no request runs or waits there and none of its blocks is in use."""
    for server in servers:
        wait_until(lambda: held(server) == 0, limit, f"{server.log.name}: free blocks")  # noqa: B023
