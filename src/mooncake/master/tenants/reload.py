"""Reading the tenants' quotas again from where they are kept, while the master serves."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from mooncake.errors import ConfigError

if TYPE_CHECKING:
    from mooncake.master.service import MasterService

log = logging.getLogger("mooncake.master")


async def reload_quotas(service: MasterService) -> None:
    """Take what is kept now; all stays as it is, with a line in the log, if that cannot be read."""
    tenants, policy = service.directory.tenants, service.tenant_policy
    if tenants is None or policy is None:
        return
    async with service.changing_quotas:
        try:
            quotas = await asyncio.to_thread(policy.load)
        except ConfigError as error:
            log.error("The tenants' quotas stay as they are: %s", error)
            return
        tenants.replace(quotas)
    log.info("action=reload_tenant_quotas, tenants=%d", len(quotas))
    service.work()
