"""The HTTP server of the master: metrics, health, read-only views of the directory, removal of everything.

It shares the event loop with the RPC service, so whatever grows with the number of objects is answered in slices.
It grants no leases and changes nothing but by POST.
"""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable

from aiohttp import web

from mooncake.config_text import parse_bool
from mooncake.election.base import View
from mooncake.errors import ErrorCode, StoreError
from mooncake.master.drain_admin import DrainRoutes
from mooncake.master.metrics import CONTENT_TYPE, Metrics
from mooncake.master.replies import OF_TENANTS, failure, health_reply, json_reply, leader_reply
from mooncake.master.service import MasterService
from mooncake.master.summary import Summary
from mooncake.master.tenants.admin import TenantRoutes
from mooncake.master.tenants.names import scope_of, wrong_name
from mooncake.security.bearer import require_admin_key
from mooncake.security.http_port import serve_http

logger = logging.getLogger(__name__)

REPORT_SECONDS = 10.0
_SLICE = 1000  # keys looked up at a time
_LONGEST_REQUEST_LINE = 1 << 20  # bytes; /batch_query_keys lists its keys there
_STATUS = {"OK": 1, "DRAINING": 2, "DRAINED": 3}  # the drop-in's numbers; 0 for all others


_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class AdminServer:
    """Serves one master's HTTP interface on a socket that is listening already."""

    def __init__(self, service: MasterService) -> None:
        self._service = service
        self._directory = service.directory
        self._metrics = Metrics(service)
        self._summary = Summary(self._metrics.values)
        self._report = Summary(self._metrics.values)
        self._runner = web.AppRunner(
            self._application(),
            access_log=None,
            handle_signals=False,
            shutdown_timeout=0.1,
            max_line_size=_LONGEST_REQUEST_LINE,
        )

    async def start(self, listening: socket.socket) -> None:
        await self._runner.setup()
        await serve_http(self._runner, listening)

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def report(self) -> None:
        """Log the summary every 10 seconds, until cancelled."""
        while True:
            logger.info("Master Admin Metrics: %s", self._report.line())
            await asyncio.sleep(REPORT_SECONDS)

    def _application(self) -> web.Application:
        service = self._service
        checks = require_admin_key(service.admin_key, service.secret, of_tenants=OF_TENANTS)
        application = web.Application(middlewares=[*checks, self._only_while_leading, _answer_failures])
        get, post = application.router.add_get, application.router.add_post
        get("/metrics", self._get_metrics)
        get("/metrics/summary", self._get_summary)
        get("/health", self._get_health)
        get("/role", self._get_role)
        get("/ha_status", self._get_ha_status)
        get("/leader", self._get_leader)
        get("/kv_events/status", self._get_kv_events_status)
        get("/query_key", self._query_key)
        get("/batch_query_keys", self._batch_query_keys)
        get("/get_all_keys", self._get_all_keys)
        get("/get_all_segments", self._get_all_segments)
        get("/get_segments_detail", self._get_segments_detail)
        get("/query_segment", self._query_segment)
        get("/api/v1/segments/status", self._get_segment_status)
        post("/api/v1/remove_all", self._remove_all)
        post("/api/v1/snapshots", self._take_snapshot)
        DrainRoutes(self._service).add_to(application)
        TenantRoutes(self._service).add_to(application)
        return application

    @web.middleware
    async def _only_while_leading(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        reign = self._service.reign
        if reign is None or reign.holds():
            return await handler(request)
        return json_reply(
            {
                "success": False,
                "error_code": int(ErrorCode.UNAVAILABLE_IN_CURRENT_STATUS),
                "error_message": "this master leads no longer, and is about to be a standby",
            },
            503,
        )

    # ------------------------------------------------------------ the master itself

    async def _get_metrics(self, _: web.Request) -> web.Response:
        return _text(self._metrics.text())

    async def _get_summary(self, _: web.Request) -> web.Response:
        return _text(self._summary.line())

    async def _get_health(self, _: web.Request) -> web.Response:
        return health_reply("leader", "serving", True, self._view)

    async def _get_role(self, _: web.Request) -> web.Response:
        return web.Response(text="leader")

    async def _get_ha_status(self, _: web.Request) -> web.Response:
        return web.Response(text="serving")

    async def _get_leader(self, _: web.Request) -> web.Response:
        return leader_reply(self._view)

    @property
    def _view(self) -> View | None:
        """As which this master was elected; None if it stands alone."""
        return None if self._service.reign is None else self._service.reign.view

    async def _get_kv_events_status(self, _: web.Request) -> web.Response:
        counters = self._service.counters
        return json_reply(
            {
                "enabled": self._service.publishes_events,
                "published_batches": counters["mooncake_kv_events_batches_total"],
                "published_events": counters["mooncake_kv_events_published_total"],
                "dropped_events": counters["mooncake_kv_events_dropped_total"],
                "skipped_unparsed_keys": counters["mooncake_kv_events_unparsed_keys_total"],
            }
        )

    async def _take_snapshot(self, _: web.Request) -> web.Response:
        if self._service.take_snapshot is None:
            return failure(ErrorCode.UNAVAILABLE_IN_CURRENT_MODE, "the master was started without --enable_snapshot")
        try:
            name = await self._service.take_snapshot()
        except OSError as error:
            return failure(ErrorCode.WRITE_FAIL, str(error))
        return json_reply({"success": True, "snapshot": name})

    # ------------------------------------------------------------ keys

    def _scope(self, request: web.Request) -> str:
        """Of the tenant that is asked about; without tenants there is one name space.  Raises StoreError."""
        if self._directory.tenants is None:
            return ""
        name = request.query.get("tenant_id", "default")
        if wrong := wrong_name(name):
            raise StoreError(ErrorCode.INVALID_PARAMS, f"tenant_id {name[:200]!r}: {wrong}")
        return scope_of(name)

    async def _query_key(self, request: web.Request) -> web.Response:
        places = self._places(self._scope(request) + request.query.get("key", ""))
        if places is None:
            return failure(ErrorCode.OBJECT_NOT_FOUND)
        return json_reply({"success": True, "data": places})

    async def _batch_query_keys(self, request: web.Request) -> web.Response:
        keys = [key for key in request.query.get("keys", "").split(",") if key]
        if not keys:
            text = "No keys provided. Use ?keys=key1,key2,..."
            return json_reply({"success": False, "error": text}, status=400)
        found: dict[str, object] = {}
        scope = self._scope(request)
        for key in keys:
            places = self._places(scope + key)
            found[key] = {
                "ok": places is not None,
                "error": None if places is not None else ErrorCode.OBJECT_NOT_FOUND.name,
                "values": places,
                "disk_values": None,
                "local_disk_values": self._on_disk(scope + key) or None,
                "nof_values": None,
            }
            if len(found) % _SLICE == 0:
                await asyncio.sleep(0)
        return json_reply({"success": True, "data": found})

    async def _get_all_keys(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": CONTENT_TYPE})
        await response.prepare(request)
        scope = self._scope(request)
        slices = self._directory.keys()
        for some in slices:
            keys = [key[len(scope) :] for key in some if key.startswith(scope)] if scope else some
            if keys:
                await response.write(("\n".join(keys) + "\n").encode())
            await asyncio.sleep(0)  # write() goes on at once while the socket takes it
        await response.write_eof()
        return response

    async def _remove_all(self, request: web.Request) -> web.Response:
        try:
            force = parse_bool(request.query.get("force", "false") or "false")
        except ValueError as error:
            return failure(ErrorCode.INVALID_PARAMS, f"force: {error}")
        removed = await self._service.remove_all(force, self._scope(request))
        return json_reply({"success": True, "removed_count": removed})

    def _places(self, key: str) -> list[dict[str, object]] | None:
        """Where each whole replica of a key begins; None if there is no such key.  Grants no lease."""
        found = self._directory.peek(key)
        if found is None:
            return None
        places = []
        for number, offset, *_ in found.places:
            for info in self._directory.segment_infos([number]):
                places.append(
                    {
                        "size_": found.size,
                        "buffer_address_": offset,
                        "protocol_": info.protocol,
                        "transport_endpoint_": info.shown,
                    }
                )
        return places

    def _on_disk(self, key: str) -> list[dict[str, object]]:
        """Whose disk has the value of a key."""
        found = self._directory.peek(key)
        if found is None:
            return []
        return [
            {"object_size_": found.size, "client_id": info.client, "transport_endpoint_": info.shown}
            for number, *_ in found.places
            for info in self._directory.segment_infos([-number])
        ]

    # ------------------------------------------------------------ segments

    async def _get_all_segments(self, _: web.Request) -> web.Response:
        names = dict.fromkeys(segment.name for segment in self._directory.segments())
        return _text("".join(f"{name}\n" for name in names))

    async def _get_segments_detail(self, _: web.Request) -> web.Response:
        segments = [
            {
                "segment_name": segment.name,
                "segment_id": str(segment.segment),
                "client_id": segment.client,
                "base_address": "0x0",
                "size_bytes": segment.size,
                "size_human": f"{segment.size / (1 << 30):f} GiB",
                "te_endpoint": segment.endpoint,
                "protocol": segment.protocol,
                "status": segment.status,
                "allocator_used_bytes": segment.used,
                "allocator_capacity_bytes": segment.size,
                "allocator_usage_percent": 100 * segment.used / segment.size,
            }
            for segment in self._directory.segments()
        ]
        return json_reply({"total_segments": len(segments), "segments": segments})

    async def _query_segment(self, request: web.Request) -> web.Response:
        name = request.query.get("segment", "")
        found = [segment for segment in self._directory.segments() if segment.name == name]
        if not found:
            return web.Response(text="Failed to query segment", status=500)
        used, size = sum(segment.used for segment in found), sum(segment.size for segment in found)
        return _text(f"{name}\nUsed(bytes): {used}\nCapacity(bytes) : {size}\n")

    async def _get_segment_status(self, request: web.Request) -> web.Response:
        name = request.query.get("segment")
        if not name:
            return failure(ErrorCode.INVALID_PARAMS, "Missing segment query parameter")
        found = [segment.status for segment in self._directory.segments() if segment.name == name]
        if not found:
            return failure(ErrorCode.SEGMENT_NOT_FOUND)
        return json_reply(
            {
                "success": True,
                "segment": name,
                "status": _STATUS.get(found[0], 0),
                "status_name": found[0],
                "error_code": 0,
                "error_message": "",
            }
        )


@web.middleware
async def _answer_failures(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """A mistake of ours is one JSON answer and one log entry, not a page."""
    try:
        return await handler(request)
    except web.HTTPException:
        raise
    except StoreError as error:
        return failure(error.code, str(error))
    except Exception:
        logger.exception("The HTTP request %s failed", request.path)
        return failure(ErrorCode.INTERNAL_ERROR)


def _text(text: str) -> web.Response:
    return web.Response(body=text.encode(), headers={"Content-Type": CONTENT_TYPE})
