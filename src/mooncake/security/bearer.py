"""HTTP servers of this package: whoever asks must tell the cluster's secret, if there is one."""

from collections.abc import Awaitable, Callable

from aiohttp import web
from aiohttp.typedefs import Middleware

from mooncake.security.secret import BEARER_MISSING, Secret

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def require_bearer(secret: Secret | None, *, open_paths: frozenset[str] = frozenset({"/health"})) -> list[Middleware]:
    """Middlewares for an application: 401 unless the request says `Authorization: Bearer SECRET`.  None without one."""
    if secret is None:
        return []

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path not in open_paths and not secret.is_told_by(request.headers.get("Authorization", "")):
            return web.json_response(
                {"success": False, "error_code": -601, "error_message": BEARER_MISSING},
                status=401,
                headers={"WWW-Authenticate": "Bearer"},
            )
        return await handler(request)

    return [check]
