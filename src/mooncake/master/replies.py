"""How the admin server's answers look."""

from __future__ import annotations

import msgspec
from aiohttp import web

from mooncake.election.base import View
from mooncake.errors import ErrorCode

OF_TENANTS = frozenset({"/query_key", "/batch_query_keys", "/get_all_keys", "/api/v1/tenant_quotas"})
"""Routes that show what belongs to any of them."""

_JSON = "application/json"
_HTTP_STATUS = {
    ErrorCode.INVALID_PARAMS: 400,
    ErrorCode.OBJECT_NOT_FOUND: 404,
    ErrorCode.SEGMENT_NOT_FOUND: 404,
    ErrorCode.TASK_NOT_FOUND: 404,
    ErrorCode.JOB_NOT_FOUND: 404,
    ErrorCode.TENANT_NOT_REGISTERED: 404,
    ErrorCode.TENANT_NOT_EMPTY: 409,
    ErrorCode.UNAVAILABLE_IN_CURRENT_MODE: 409,
    ErrorCode.UNAVAILABLE_IN_CURRENT_STATUS: 409,
}


def failure(code: ErrorCode, message: str = "") -> web.Response:
    """The answer to a request that ended with `code`."""
    status = _HTTP_STATUS.get(code, 500)
    return json_reply({"success": False, "error_code": int(code), "error_message": message or code.name}, status)


def health_reply(role: str, state: str, ready: bool, view: View | None) -> web.Response:
    """`view`: who leads, if that is known and elected."""
    return json_reply({"status": "ok", "role": role, "ha_state": state, "service_ready": ready, **_told(view)})


def leader_reply(view: View | None) -> web.Response:
    return json_reply({"present": view is not None, **_told(view)})


def _told(view: View | None) -> dict[str, object]:
    if view is None:
        return {"leader_address": None, "view_version": None}
    return {"leader_address": view.address, "view_version": view.term}


def json_reply(content: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(content), content_type=_JSON, charset="utf-8", status=status)
