"""The routes of docs/rest.md on a store.  Every call of the store runs in a thread: none holds the loop."""

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from typing import Any, ParamSpec, TypeVar

from aiohttp import web
from aiohttp.typedefs import Middleware

from mooncake.config_text import shown
from mooncake.rest.bodies import BadRequestError, Body
from mooncake.rest.modes import Modes, UnmountError
from mooncake.rest.room import NoRoomError, Room
from mooncake.security.http_port import serve_http
from mooncake.security.secret import BEARER_MISSING, Secret, read_secret
from mooncake.store import MooncakeDistributedStore

logger = logging.getLogger("mooncake.rest")

LARGEST_BODY = 100 << 20
ALL_BODIES = 4 * LARGEST_BODY  # of the requests that are being worked on
PATIENCE = 30.0  # seconds to wait for room
BODY_LIMIT = 60.0  # seconds in which a body must have come
LONGEST_KEY = 64 << 10
LONGEST_GRACE = 3600  # seconds

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Given = ParamSpec("Given")
Result = TypeVar("Result")


class FailedError(Exception):
    """The store did not do it: 500, with this text."""


class RestServer:
    """`protocol`: of segments, where a request names none.  `directories`: segments may lie in files under these, which
    a mount overwrites.  `executor` runs the store's calls."""

    def __init__(
        self, store: MooncakeDistributedStore, protocol: str, directories: list[str], executor: Executor
    ) -> None:
        self._store = store
        self._protocol = protocol
        self._directories = [os.path.realpath(directory) for directory in directories]
        self._executor = executor
        self._modes = Modes(store)
        middlewares = [_as_json, *_asking_for(read_secret()), _in_room(Room(ALL_BODIES, PATIENCE))]
        application = web.Application(client_max_size=LARGEST_BODY, middlewares=middlewares)
        application.add_routes(
            [
                web.put("/api/put", self._put),
                web.get("/api/get/{key:.+}", self._get),
                web.get("/api/exist/{key:.+}", self._exist),
                web.delete("/api/remove/{key:.+}", self._remove),
                web.delete("/api/remove_all", self._remove_all),
                web.post("/api/mount", self._mount),
                web.post("/api/unmount", self._unmount),
                web.post("/api/mount_shm", self._mount_shm),
                web.post("/api/unmount_shm", self._unmount_shm),
                web.post("/api/unmount_local_disk", self._unmount_local_disk),
                web.post("/api/reconfigure", self._reconfigure),
            ]
        )
        self._runner = web.AppRunner(
            application,
            access_log=None,
            handle_signals=False,
            shutdown_timeout=1.0,
            max_line_size=LONGEST_KEY,
        )

    async def start(self, bound: socket.socket) -> None:
        """Listen on a bound socket.  Raises OSError."""
        await self._runner.setup()
        await serve_http(self._runner, bound, backlog=1024)

    async def stop(self) -> None:
        """Requests under way are given a second."""
        await self._runner.cleanup()

    async def _call(self, function: Callable[Given, Result], *args: Given.args, **kwargs: Given.kwargs) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._executor, lambda: function(*args, **kwargs))

    # -- values

    async def _put(self, request: web.Request) -> web.Response:
        body = await Body.of(request)
        key, value = body.get("key"), body.get("value")
        if not key or value is None:
            raise BadRequestError("Missing key or value")
        if await self._call(self._store.put, body.text("key"), body.encoded("value")):
            raise FailedError("PUT operation failed")
        return _success()

    async def _get(self, request: web.Request) -> web.Response:
        key = request.match_info["key"]
        value = await self._call(self._store.get, key)
        if not value:
            if not await self._exists(key):
                return web.json_response({"error": "Key not found"}, status=404)
            raise FailedError("GET operation failed")
        return web.Response(body=value, content_type="application/octet-stream")

    async def _exist(self, request: web.Request) -> web.Response:
        return web.json_response({"exists": await self._exists(request.match_info["key"])})

    async def _exists(self, key: str) -> bool:
        found = await self._call(self._store.is_exist, key)
        if found < 0:
            raise FailedError("Exist check failed")
        return found == 1

    async def _remove(self, request: web.Request) -> web.Response:
        if await self._call(self._store.remove, request.match_info["key"]):
            raise FailedError("Remove operation failed")
        return _success()

    async def _remove_all(self, _: web.Request) -> web.Response:
        removed = await self._call(self._store.remove_all)
        if removed < 0:
            raise FailedError("RemoveAll operation failed")
        return web.json_response({"status": f"success removed {removed} keys"})

    # -- segments

    async def _mount(self, request: web.Request) -> web.Response:
        body = await Body.of(request)
        size = body.get("size")
        if type(size) is not int or not 0 < size < 1 << 63:
            raise BadRequestError("Invalid size, must be a positive integer")
        protocol, location = body.text("protocol", self._protocol), body.text("location", "")
        mounted = await self._call(self._store.allocate_and_mount_segment, size, protocol, location)
        if mounted["ret"]:
            raise FailedError(f"Allocate and mount failed, ret={mounted['ret']}")
        return _success(segment_ids=mounted["segment_ids"], allocated_size=mounted["allocated_size"])

    async def _unmount(self, request: web.Request) -> web.Response:
        body = await Body.of(request)
        segments, grace = body.segments(), body.whole("grace_period_seconds", 0)
        code = await self._call(self._store.unmount_and_free_segment, segments, grace)
        if code:
            raise FailedError(f"Unmount and free failed, ret={code}")
        return _success()

    async def _mount_shm(self, request: web.Request) -> web.Response:
        body = await Body.of(request)
        path = body.shared_memory()
        if path is None or body.get("size") is None:
            raise BadRequestError("Missing or invalid name or size")
        path = self._permitted(path)
        mounted = await self._call(self._store.mount_segment, path, *self._where(body))
        if mounted["ret"]:
            raise FailedError(f"Mount failed, ret={mounted['ret']}")
        return _success(segment_ids=mounted["segment_ids"])

    async def _unmount_shm(self, request: web.Request) -> web.Response:
        body = await Body.of(request)
        failed = await self._call(self._modes.unmount, body.segments(), body.whole("grace_period_seconds", 0))
        if failed:
            error = {"error": "Unmount failed for one or more segments", "failed_segment_ids": failed}
            return web.json_response(error, status=500)
        return _success()

    async def _unmount_local_disk(self, request: web.Request) -> web.Response:
        body = await Body.of(request)
        grace = body.whole("grace_period_seconds", 0, LONGEST_GRACE)
        code = await self._call(self._store.unmount_local_disk_segment)
        if code:
            raise FailedError(f"Unmount local disk failed, ret={code}")
        await asyncio.sleep(grace)  # here it ends with the service, as the store's own waiting would not
        return _success()

    async def _reconfigure(self, request: web.Request) -> web.Response:
        body = await Body.of(request)
        mode = body.text("mode", "").lower()
        if mode == "decode":
            path = body.text("path", "")
            if not path or body.get("size") is None:
                raise BadRequestError("Missing path or size for decode mode")
            path = self._permitted(path)
            change = await self._call(self._modes.decode, path, *self._where(body))
            if change.error:
                return web.json_response({"error": change.error, "mode": change.mode}, status=500)
            return _success(mode=change.mode, segment_ids=change.segments)
        if mode == "prefill":
            try:
                await self._call(self._modes.prefill)
            except UnmountError as error:
                raise FailedError(str(error)) from None
            return _success(mode=mode)
        raise BadRequestError("Invalid mode. Use 'decode' or 'prefill'")

    def _permitted(self, path: str) -> str:
        """Whoever reaches the port may have files overwritten: not any file."""
        real = os.path.realpath(path) if "\0" not in path else ""
        if not any(real.startswith(f"{directory}/") for directory in self._directories):
            allowed = " or ".join(self._directories)
            raise BadRequestError(
                f"{shown(path)} is not a file in {allowed}; the service's --segment-dir allows another directory"
            )
        return real

    def _where(self, body: Body) -> tuple[int, int, str, str]:
        """Size, offset, protocol and location of a segment."""
        return (
            body.whole("size"),
            body.whole("offset", 0),
            body.text("protocol", self._protocol),
            body.text("location", ""),
        )


def _success(**more: Any) -> web.Response:
    return web.json_response({"status": "success", **more})


def _asking_for(secret: Secret | None) -> list[Middleware]:
    """401 for whoever does not tell the cluster's secret, if there is one."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if secret is not None and not secret.is_told_by(request.headers.get("Authorization", "")):
            return web.json_response({"error": BEARER_MISSING}, status=401, headers={"WWW-Authenticate": "Bearer"})
        return await handler(request)

    return [] if secret is None else [check]


def _in_room(room: Room) -> Middleware:
    """A body waits, unread, until there is room for it, and keeps that until the request is answered."""

    @web.middleware
    async def hold(request: web.Request, handler: Handler) -> web.StreamResponse:
        size = LARGEST_BODY if request.content_length is None else request.content_length
        if not request.can_read_body or size > LARGEST_BODY:
            return await handler(request)
        async with room.take(size):
            try:
                async with asyncio.timeout(BODY_LIMIT):
                    await request.read()
            except TimeoutError:
                raise web.HTTPRequestTimeout from None
            return await handler(request)

    return hold


@web.middleware
async def _as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error as {"error": text}."""
    try:
        return await handler(request)
    except BadRequestError as error:
        return web.json_response({"error": str(error)}, status=400)
    except FailedError as error:
        return web.json_response({"error": str(error)}, status=500)
    except NoRoomError as error:
        return web.json_response({"error": str(error)}, status=503, headers={"Retry-After": "1"})
    except web.HTTPRequestEntityTooLarge:
        return web.json_response({"error": f"the body is larger than {LARGEST_BODY >> 20} MB"}, status=400)
    except web.HTTPException as error:
        headers = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else None
        return web.json_response({"error": error.reason}, status=error.status, headers=headers)
    except Exception as error:
        logger.exception("%s %s failed", request.method, request.path)
        return web.json_response({"error": f"{type(error).__name__}: {error}"}, status=500)
