"""The HTTP routes about drain jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from mooncake.errors import ErrorCode, StoreError
from mooncake.master.drains import STATES, Job
from mooncake.master.replies import failure, json_reply

if TYPE_CHECKING:
    from mooncake.master.service import MasterService

_DRAIN = 0  # the only type of job


class _Wanted(msgspec.Struct):
    segments: list[str]
    target_segments: list[str] = []
    max_concurrency: int = 4


class DrainRoutes:
    """POST /api/v1/drain_jobs, GET …/query, POST …/cancel."""

    def __init__(self, service: MasterService) -> None:
        self._service = service

    def add_to(self, application: web.Application) -> None:
        application.router.add_post("/api/v1/drain_jobs", self._create)
        application.router.add_get("/api/v1/drain_jobs/query", self._query)
        application.router.add_post("/api/v1/drain_jobs/cancel", self._cancel)

    async def _create(self, request: web.Request) -> web.Response:
        try:
            wanted = msgspec.json.decode(await request.read(), type=_Wanted)
        except msgspec.MsgspecError as error:
            return failure(ErrorCode.INVALID_PARAMS, f'expected a body such as {{"segments": ["host:port"]}}: {error}')
        drains = self._service.directory.drains
        job = drains.create(wanted.segments, wanted.target_segments, wanted.max_concurrency)
        self._service.hurry()
        return _brief(job)

    async def _query(self, request: web.Request) -> web.Response:
        job = self._service.directory.drains.job(_number(request))
        return json_reply(
            {
                "success": True,
                "job_id": _id(job),
                "type": _DRAIN,
                "type_name": "DRAIN",
                "status": job.status,
                "status_name": STATES[job.status],
                "created_at_ms_epoch": int(job.created * 1000),
                "last_updated_at_ms_epoch": int(job.updated * 1000),
                "segments": job.names,
                "succeeded_units": job.moved + job.on_disk,
                "failed_units": len(job.given_up),
                "blocked_units": job.blocked,
                "active_units": len(job.moving),
                "migrated_bytes": job.moved_bytes,
                "message": job.message,
                "error_code": 0,
                "error_message": "",
            }
        )

    async def _cancel(self, request: web.Request) -> web.Response:
        return _brief(self._service.directory.drains.cancel(_number(request)))


def _brief(job: Job) -> web.Response:
    return json_reply(
        {"success": True, "job_id": _id(job), "status": STATES[job.status], "error_code": 0, "error_message": ""}
    )


def _id(job: Job) -> str:
    return f"{job.number[0]}-{job.number[1]}"


def _number(request: web.Request) -> tuple[int, int]:
    """Raises StoreError INVALID_PARAMS."""
    high, _, low = request.query.get("job_id", "").partition("-")
    if not (high.isascii() and high.isdigit() and low.isascii() and low.isdigit()):
        raise StoreError(ErrorCode.INVALID_PARAMS, "Missing or invalid job_id")
    return int(high), int(low)
