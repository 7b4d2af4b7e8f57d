"""The HTTP routes about tenants and their quotas."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from mooncake.errors import ConfigError, ErrorCode
from mooncake.master.replies import failure, json_reply
from mooncake.master.tenants.registry import Tenant, Tenants

if TYPE_CHECKING:
    from mooncake.master.service import MasterService


class _Wanted(msgspec.Struct, forbid_unknown_fields=True):
    requested_quota_bytes: int


class TenantRoutes:
    """GET, PUT and DELETE /api/v1/tenant_quotas."""

    def __init__(self, service: MasterService) -> None:
        self._service = service

    def add_to(self, application: web.Application) -> None:
        route = "/api/v1/tenant_quotas"
        application.router.add_get(route, self._get)
        application.router.add_put(route, self._put)
        application.router.add_delete(route, self._delete)

    async def _get(self, request: web.Request) -> web.Response:
        tenants = self._service.directory.tenants
        if tenants is None:
            return failure(ErrorCode.UNAVAILABLE_IN_CURRENT_MODE)
        name = request.query.get("tenant_id")
        if name is None:
            return json_reply({"success": True, "data": [_shown(tenants, tenant) for tenant in tenants]})
        tenant = tenants.named(name)
        if tenant is None:
            return failure(ErrorCode.OBJECT_NOT_FOUND)
        return json_reply({"success": True, "data": _shown(tenants, tenant)})

    async def _put(self, request: web.Request) -> web.Response:
        tenants = self._service.directory.tenants
        if tenants is None:
            return failure(ErrorCode.UNAVAILABLE_IN_CURRENT_MODE)
        try:
            wanted = msgspec.json.decode(await request.read(), type=_Wanted).requested_quota_bytes
        except msgspec.MsgspecError as error:
            return failure(
                ErrorCode.INVALID_PARAMS, f'expected a body such as {{"requested_quota_bytes": 1073741824}}: {error}'
            )
        name = request.query.get("tenant_id", "")
        async with self._service.changing_quotas:
            before = tenants.named(name)
            former = None if before is None else before.quota
            tenant = tenants.set_quota(name, wanted)
            if problem := await self._keep(tenants):
                tenants.restore(tenant, former)
                return problem
        return json_reply({"success": True, "data": _shown(tenants, tenant)})

    async def _delete(self, request: web.Request) -> web.Response:
        tenants = self._service.directory.tenants
        if tenants is None:
            return failure(ErrorCode.UNAVAILABLE_IN_CURRENT_MODE)
        name = request.query.get("tenant_id", "")
        if not name:
            return failure(ErrorCode.INVALID_PARAMS, "Missing tenant_id query parameter")
        async with self._service.changing_quotas:
            tenant = tenants.named(name)
            if tenant is None or tenant.quota is None:
                return json_reply({"success": True, "data": None})
            shown, former = _shown(tenants, tenant), tenant.quota
            tenants.remove(name)
            if problem := await self._keep(tenants):
                tenants.set_quota(name, former)
                return problem
        return json_reply({"success": True, "data": shown})

    async def _keep(self, tenants: Tenants) -> web.Response | None:
        """Write the policy down; why that failed."""
        policy = self._service.tenant_policy
        if policy is None:
            return None
        try:
            await asyncio.to_thread(policy.save, tenants.quotas())
        except ConfigError as error:
            return failure(ErrorCode.INTERNAL_ERROR, str(error))
        return None


def _shown(tenants: Tenants, tenant: Tenant) -> dict[str, object]:
    limit = tenants.limit(tenant)
    return {
        "tenant_id": tenant.name,
        "requested_quota_bytes": tenant.quota or 0,
        "effective_quota_bytes": limit,
        "used_bytes": tenant.used,
        "reserved_bytes": tenant.reserved,
        "committed_count": tenant.objects,
        "metadata_object_count": tenant.objects,
        "over_quota": tenant.taken > limit,
        "has_explicit_policy": tenant.quota is not None,
    }
