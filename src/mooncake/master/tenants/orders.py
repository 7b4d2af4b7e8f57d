"""Eviction orders and probe leases that are each tenant's own: what one does moves nothing in another's.

Who asks for a victim gets one of the tenant whose `turn` it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from mooncake.master.eviction import EvictionPolicy
from mooncake.master.leases import ProbeLeases
from mooncake.master.objects import Object, Unit
from mooncake.master.tenants.registry import Tenant, Tenants


class TenantOrder(EvictionPolicy):
    """An order a tenant, made by `policy`."""

    def __init__(self, tenants: Tenants, policy: Callable[[], EvictionPolicy]) -> None:
        self._tenants = tenants
        self._policy = policy
        self._orders: dict[str, EvictionPolicy] = {}

    def _of(self, tenant: Tenant) -> EvictionPolicy:
        order = self._orders.get(tenant.scope)
        if order is None:
            order = self._orders[tenant.scope] = self._policy()
        return order

    def touch(self, unit: Unit) -> None:
        self._of(self._tenants.owner(unit)).touch(unit)

    def touch_new(self, units: list[Unit]) -> None:
        for unit in units:
            self.touch(unit)

    def remove(self, unit: Unit) -> None:
        self._of(self._tenants.owner(unit)).remove(unit)

    def put_first(self, unit: Unit) -> None:
        self._of(self._tenants.owner(unit)).put_first(unit)

    def walk(self, length: int) -> Iterator[list[Unit]]:
        """One tenant's after another's."""
        for order in list(self._orders.values()):
            yield from order.walk(length)

    def victim(self) -> Unit | None:
        turn = self._tenants.turn
        return None if turn is None else self._of(turn).victim()

    def __contains__(self, unit: Unit) -> bool:
        return unit in self._of(self._tenants.owner(unit))


class TenantProbes(ProbeLeases):
    """Probe leases a tenant.  What is touched in one call is one tenant's."""

    def __init__(self, tenants: Tenants, ttl: float) -> None:
        super().__init__(ttl)
        self._tenants = tenants
        self._leases: dict[str, ProbeLeases] = {}

    def __bool__(self) -> bool:
        return any(self._leases.values())

    def touch(self, objects: list[Object], now: float) -> None:
        if not objects:
            return
        scope = self._tenants.owner(objects[0]).scope
        leases = self._leases.get(scope)
        if leases is None:
            leases = self._leases[scope] = ProbeLeases(self.ttl)
        leases.touch(objects, now)
        self.moment_ends = leases.moment_ends

    def ended(self, now: float, limit: int) -> list[Unit]:
        units: list[Unit] = []
        for leases in self._leases.values():
            if len(units) >= limit:
                break
            units += leases.ended(now, limit - len(units))
        return units

    def oldest(self) -> float | None:
        leases = self._turn()
        return None if leases is None else leases.oldest()

    def break_oldest(self, latest_grant: float) -> Unit | None:
        leases = self._turn()
        return None if leases is None else leases.break_oldest(latest_grant)

    def _turn(self) -> ProbeLeases | None:
        turn = self._tenants.turn
        return None if turn is None else self._leases.get(turn.scope)
