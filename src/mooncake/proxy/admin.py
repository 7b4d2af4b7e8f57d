"""Routes about the proxy itself: health, status, metrics, and instances that come and go.

Changes need the header X-API-Key with the value of the environment variable ADMIN_API_KEY; without that variable they
are refused.
"""

import hmac
from collections.abc import Callable
from typing import Literal

import msgspec
from aiohttp import web
from yarl import URL

from mooncake.proxy.config import DEFAULT_BOOTSTRAP_PORT, Connector, ProxyConfig
from mooncake.proxy.errors import JSON, error_response
from mooncake.proxy.instances import Fleet, Instance, Role, State
from mooncake.proxy.keeper import Keeper
from mooncake.proxy.metrics import CONTENT_TYPE, Metrics

_KEY_HEADER = "X-API-Key"


class _Change(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["prefill", "decode"]
    url: str
    bootstrap_port: int | None = None


def make_instance(role: Role, url: str, bootstrap_port: int | None, connector: Connector) -> Instance:
    """Raises ValueError with one sentence if an instance cannot be reached by that."""
    try:
        parsed = URL(url)
        good = parsed.scheme in ("http", "https") and bool(parsed.host) and not parsed.query_string
    except ValueError:
        good = False
    if not good:
        raise ValueError(f"{url!r} is not an instance's URL: expected something like http://127.0.0.1:8100.")
    if role is Role.DECODE and bootstrap_port is not None:
        raise ValueError("A decode instance has no bootstrap port: leave bootstrap_port out.")
    if role is Role.PREFILL and connector is Connector.MOONCAKE and bootstrap_port is None:
        bootstrap_port = DEFAULT_BOOTSTRAP_PORT
    if bootstrap_port is not None and not 0 < bootstrap_port < 65536:
        raise ValueError(f"{bootstrap_port} is not a bootstrap port: expected a number from 1 to 65535.")
    return Instance(role, url, bootstrap_port)


class Admin:
    def __init__(self, config: ProxyConfig, fleet: Fleet, keeper: Keeper, metrics: Metrics) -> None:
        self._config, self._fleet, self._keeper, self._metrics = config, fleet, keeper, metrics

    def add_routes(self, router: web.UrlDispatcher) -> None:
        router.add_get("/health", self._get_health)
        router.add_get("/healthcheck", self._get_health)
        router.add_get("/status", self._get_status)
        router.add_get("/metrics", self._get_metrics)
        router.add_post("/instances/add", self._add)
        router.add_post("/instances/remove", self._remove)

    async def _get_health(self, _: web.Request) -> web.Response:
        decode, prefill = len(self._fleet.ready(Role.DECODE)), len(self._fleet.ready(Role.PREFILL))
        content = {
            "status": "ok" if decode else "unavailable",
            "prefill_instances": prefill,
            "decode_instances": decode,
        }
        return _json(content, 200 if decode else 503)

    async def _get_status(self, _: web.Request) -> web.Response:
        return _json(
            {
                "policy": self._config.policy,
                "connector": self._config.connector,
                "resume": self._config.resume_by,
                "prefill": [_shown(instance) for instance in self._fleet.of(Role.PREFILL)],
                "decode": [_shown(instance) for instance in self._fleet.of(Role.DECODE)],
            }
        )

    async def _get_metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self._metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    async def _add(self, request: web.Request) -> web.Response:
        return await self._change(request, self._add_instance)

    async def _remove(self, request: web.Request) -> web.Response:
        return await self._change(request, self._remove_instance)

    async def _change(self, request: web.Request, change: Callable[[_Change], web.Response]) -> web.Response:
        if not self._config.admin_key:
            return error_response(403, "Set ADMIN_API_KEY in the proxy's environment to add or remove instances.")
        given = request.headers.get(_KEY_HEADER, "")
        if not hmac.compare_digest(given.encode(errors="replace"), self._config.admin_key.encode()):
            return error_response(401, f"The header {_KEY_HEADER} must have the value of the proxy's ADMIN_API_KEY.")
        try:
            return change(msgspec.json.decode(await request.read(), type=_Change))
        except msgspec.DecodeError as error:
            text = f'Expected {{"role": "prefill" or "decode", "url": ..., "bootstrap_port": optional}}: {error}.'
            return error_response(400, text)
        except ValueError as error:
            return error_response(400, str(error))

    def _add_instance(self, asked: _Change) -> web.Response:
        role = Role(asked.role)
        instance = make_instance(role, asked.url, asked.bootstrap_port, self._config.connector)
        present = self._fleet.find(role, instance.url)
        if present is None:
            self._keeper.add(instance)
            return _json({"status": "added", "instance": _shown(instance)})
        if present.state is not State.DRAINING:
            raise ValueError(f"{role} instance {instance.url} is there already.")
        present.bootstrap_port = instance.bootstrap_port
        self._keeper.take_back(present)
        return _json({"status": "added", "instance": _shown(present)})

    def _remove_instance(self, asked: _Change) -> web.Response:
        instance = self._fleet.find(Role(asked.role), asked.url)
        if instance is None:
            return error_response(404, f"There is no {asked.role} instance {asked.url}.")
        self._keeper.remove(instance)
        return _json({"status": "draining", "instance": _shown(instance)})


def _shown(instance: Instance) -> dict[str, object]:
    shown: dict[str, object] = {
        "url": instance.url,
        "role": instance.role,
        "state": instance.state,
        "in_flight": instance.in_flight,
        "served": instance.served,
        "failures": instance.failures,
        "last_error": instance.last_error,
    }
    if instance.bootstrap_port is not None:
        shown["bootstrap"] = instance.bootstrap
    return shown


def _json(content: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(content), content_type=JSON, charset="utf-8", status=status)
