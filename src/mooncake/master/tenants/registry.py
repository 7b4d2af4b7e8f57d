"""The tenants: what each may have in memory, and what it has.

    quota       what its policy asks for
    limit       what it gets: the quota, or its part of the pool if all quotas together exceed the pool
    used        bytes of its complete values;   reserved   of its puts in progress
    leaving     bytes of `used` that leave memory as soon as they have been written to disk
    quarantined bytes of former values and puts that nobody may reuse yet (see pool)

So the limits never add up to more than the pool, and a tenant inside its own needs nothing of anybody else's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mooncake.errors import ErrorCode, StoreError
from mooncake.master.objects import Group, Object, Unit, parts
from mooncake.master.pool import Pool
from mooncake.master.tenants.names import scope_in, scope_of, wrong_name


class Tenant:
    """One tenant; `quota` None: no policy names it, it only has values of former times.  All figures are bytes but
    `objects`, `evicted` and `refused`, which count values."""

    __slots__ = (
        "evicted", "evicting", "leaving", "name", "objects", "quarantined", "quota", "refused", "reserved", "scope",
        "used",
    )  # fmt: skip

    def __init__(self, name: str, quota: int | None) -> None:
        self.name = name
        self.scope = scope_of(name)
        self.quota = quota
        self.used = self.reserved = self.leaving = self.quarantined = 0
        self.evicting = 0  # still to go ahead of demand
        self.objects = self.evicted = self.refused = 0

    @property
    def taken(self) -> int:
        return self.used + self.reserved

    @property
    def held(self) -> int:
        """All that others cannot have."""
        return self.used + self.reserved + self.quarantined

    @property
    def is_empty(self) -> bool:
        return not (self.objects or self.reserved)


class Tenants:
    """All that have a policy or a value.  `turn`: whose units eviction looks at."""

    def __init__(self, quotas: Mapping[str, int], pool: Pool) -> None:
        self._pool = pool
        self._by_scope: dict[str, Tenant] = {}
        for name, quota in quotas.items():
            tenant = Tenant(name, quota)
            self._by_scope[tenant.scope] = tenant
        self._requested = sum(quotas.values())
        self.turn: Tenant | None = None

    def __iter__(self) -> Iterator[Tenant]:
        return iter(list(self._by_scope.values()))

    def named(self, name: str) -> Tenant | None:
        return self._by_scope.get(scope_of(name))

    def quotas(self) -> dict[str, int]:
        """The policy as a whole."""
        return {tenant.name: tenant.quota for tenant in self if tenant.quota is not None}

    # -- whose is it?

    def of(self, key: str) -> Tenant | None:
        """The tenant of a key as the directory knows it; None if nobody knows it."""
        return self._by_scope.get(scope_in(key))

    def owner(self, unit: Unit) -> Tenant:
        """The tenant of what is, or comes, into the directory."""
        name = unit.name if isinstance(unit, Group) else unit.key if isinstance(unit, Object) else ""
        scope = scope_in(name)
        tenant = self._by_scope.get(scope)
        if tenant is None:
            tenant = self._by_scope[scope] = Tenant(scope[1:-1], None)
        return tenant

    def forget_unknown(self, tenant: Tenant) -> None:
        """Without a policy, a tenant is only known as long as it has something."""
        if tenant.quota is None and tenant.is_empty:
            self._by_scope.pop(tenant.scope, None)

    # -- limits

    def capacity(self) -> int:
        """Bytes that the limits share."""
        return sum([segment.size for segment in self._pool.segments.values() if not segment.draining])

    def limit(self, tenant: Tenant) -> int:
        """Bytes that it may have."""
        return self._limit(tenant, self.capacity())

    def _limit(self, tenant: Tenant, capacity: int) -> int:
        if tenant.quota is None:
            return 0
        return tenant.quota if self._requested <= capacity else tenant.quota * capacity // self._requested

    def limits(self) -> list[tuple[Tenant, int]]:
        """All with their limits."""
        capacity = self.capacity()
        return [(tenant, self._limit(tenant, capacity)) for tenant in self]

    def over(self) -> list[tuple[Tenant, int]]:
        """Who has more than its limit (a segment was lost, or its quota was cut), the farthest above first, and by how
        many bytes."""
        over = [(tenant, tenant.taken - tenant.leaving - limit, limit) for tenant, limit in self.limits()]
        over.sort(key=lambda each: each[1] / max(1, each[2]), reverse=True)
        return [(tenant, excess) for tenant, excess, _ in over if excess > 0]

    # -- the policy

    def set_quota(self, name: str, quota: int) -> Tenant:
        """Raises StoreError INVALID_PARAMS."""
        if wrong := wrong_name(name):
            raise StoreError(ErrorCode.INVALID_PARAMS, f"tenant {name[:200]!r}: {wrong}")
        if quota <= 0:
            raise StoreError(ErrorCode.INVALID_PARAMS, f"quota {quota} of tenant {name}: expected a positive number")
        tenant = self.named(name)
        if tenant is None:
            tenant = Tenant(name, None)
            self._by_scope[tenant.scope] = tenant
        self._requested += quota - (tenant.quota or 0)
        tenant.quota = quota
        return tenant

    def replace(self, quotas: Mapping[str, int]) -> None:
        """These are all.  Values of a tenant that is not among them stay until others need their room."""
        for tenant in self:
            if tenant.quota is not None and tenant.name not in quotas:
                self.restore(tenant, None)
                self.forget_unknown(tenant)
        for name, quota in quotas.items():
            self.set_quota(name, quota)

    def restore(self, tenant: Tenant, quota: int | None) -> None:
        """Take the last `set_quota` of `tenant` back."""
        self._requested += (quota or 0) - (tenant.quota or 0)
        tenant.quota = quota

    def remove(self, name: str) -> None:
        """Raises StoreError TENANT_NOT_REGISTERED, TENANT_NOT_EMPTY."""
        tenant = self.named(name)
        if tenant is None or tenant.quota is None:
            raise StoreError(ErrorCode.TENANT_NOT_REGISTERED)
        if not tenant.is_empty:
            raise StoreError(ErrorCode.TENANT_NOT_EMPTY)
        self._requested -= tenant.quota
        del self._by_scope[tenant.scope]


def taken(obj: Object) -> int:
    """Bytes of memory that all replicas of `obj` take."""
    return sum([part.taken for part in parts(obj)])
