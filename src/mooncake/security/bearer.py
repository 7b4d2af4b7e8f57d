"""HTTP servers of this package: whoever asks must tell the cluster's secret, if there is one."""

from collections.abc import Awaitable, Callable

from aiohttp import web
from aiohttp.typedefs import Middleware

from mooncake.security.secret import ADMIN_KEY, BEARER_MISSING, Secret

_ADMIN_KEY_MISSING = f"this needs the header Authorization: Bearer, with the key that {ADMIN_KEY} sets here"
_READING = frozenset({"GET", "HEAD", "OPTIONS"})

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def require_bearer(secret: Secret | None, *, open_paths: frozenset[str] = frozenset({"/health"})) -> list[Middleware]:
    """Middlewares for an application: 401 unless the request says `Authorization: Bearer SECRET`.  None without one."""
    if secret is None:
        return []

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path not in open_paths and not secret.is_told_by(request.headers.get("Authorization", "")):
            return _refuse(BEARER_MISSING)
        return await handler(request)

    return [check]


def require_admin_key(key: Secret | None, secret: Secret | None, *, of_tenants: frozenset[str]) -> list[Middleware]:
    """Middlewares for the interface of an administrator.  With a key, whatever changes anything needs it, and so do the
    paths `of_tenants`, which show what belongs to any of them; the rest may be asked with it as well as with the
    cluster's secret.  Without one, as `require_bearer`."""
    if key is None:
        return require_bearer(secret)

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        told = request.headers.get("Authorization", "")
        if not key.is_told_by(told):
            if request.method not in _READING or request.path in of_tenants:
                return _refuse(_ADMIN_KEY_MISSING)
            if secret is not None and request.path != "/health" and not secret.is_told_by(told):
                return _refuse(BEARER_MISSING)
        return await handler(request)

    return [check]


def _refuse(text: str) -> web.Response:
    return web.json_response(
        {"success": False, "error_code": -601, "error_message": text},
        status=401,
        headers={"WWW-Authenticate": "Bearer"},
    )
