"""How the admin server's answers look."""

from __future__ import annotations

import msgspec
from aiohttp import web

from mooncake.errors import ErrorCode

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


def json_reply(content: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(content), content_type=_JSON, charset="utf-8", status=status)
