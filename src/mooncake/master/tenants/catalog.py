"""The catalog of a master with tenants: keeps account of what each has in memory, in orders of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from mooncake.master.catalog import Catalog
from mooncake.master.config import MasterConfig
from mooncake.master.counters import Counters
from mooncake.master.eviction import EvictionPolicy, Lru
from mooncake.master.objects import Object, PartAt, Replica
from mooncake.master.pool import Pool
from mooncake.master.tenants.names import DEFAULT, scope_in, scope_of, wrong_name
from mooncake.master.tenants.orders import TenantOrder, TenantProbes
from mooncake.master.tenants.registry import Tenants, taken
from mooncake.master.tombstones import Tombstones
from mooncake.rpc.record_messages import Body


class TenantCatalog(Catalog):
    """`used` of every tenant is, after each step, what its complete values take."""

    takes_plain = False  # values that are nobody's are taken in one by one

    def __init__(
        self,
        config: MasterConfig,
        counters: Counters,
        pool: Pool,
        tombstones: Tombstones,
        tenants: Tenants,
        policy: Callable[[], EvictionPolicy] = Lru,
    ) -> None:
        super().__init__(config, counters, pool, tombstones, lambda: TenantOrder(tenants, policy))
        self.tenants = tenants
        self.probes = TenantProbes(tenants, self.probes.ttl)

    def insert(self, obj: Object, group: str, soft_until: float, now: float) -> None:
        tenant = self.tenants.owner(obj)
        tenant.used += taken(obj)
        tenant.objects += 1
        super().insert(obj, group, soft_until, now)

    def _drop(self, obj: Object, now: float) -> None:
        tenant = self.tenants.owner(obj)
        tenant.used -= taken(obj)
        tenant.objects -= 1
        self._pool.account = tenant
        super()._drop(obj, now)
        self._pool.account = None
        self.tenants.forget_unknown(tenant)

    def lose_replicas(self, obj: Object, lost: Callable[[int, Replica], bool], now: float) -> bool:
        before = taken(obj)
        kept = super().lose_replicas(obj, lost, now)
        self._note_change(obj, taken(obj) - before)
        return kept

    def add_replicas(self, obj: Object, added: Iterable[Replica], now: float) -> None:
        before = taken(obj)
        super().add_replicas(obj, added, now)
        self._note_change(obj, taken(obj) - before)

    def leave_memory(self, obj: Object, now: float) -> None:
        before = taken(obj)
        super().leave_memory(obj, now)
        self._note_change(obj, -before)

    def _give_back(self, obj: Object, lost: list[PartAt], now: float, *, clean: bool) -> None:
        self._pool.account = self.tenants.owner(obj)
        super()._give_back(obj, lost, now, clean=clean)
        self._pool.account = None

    def _note_change(self, obj: Object, change: int) -> None:
        tenant = self.tenants.owner(obj)
        if self.objects.get(obj.key) is obj:
            tenant.used += change
        else:  # a put that is about to end
            tenant.reserved += change

    def note_leaving(self, obj: Object, change: int) -> None:
        self.tenants.owner(obj).leaving += change

    def has_room(self, obj: Object, size: int) -> bool:
        tenant = self.tenants.owner(obj)
        return tenant.taken + size <= self.tenants.limit(tenant)

    def known_as(self, body: Body) -> Body:
        """What was put while there were no tenants is the default tenant's."""
        if body.private:
            return body
        group = body.group and scope_of(DEFAULT) + body.group
        return msgspec.structs.replace(body, key=scope_of(DEFAULT) + body.key, group=group, private=True)

    def key_of(self, name: str) -> str:
        return name if scope_in(name) else scope_of(DEFAULT) + name

    def takes(self, body: Body) -> bool:
        scope = scope_in(body.key)
        return body.private and bool(scope) and not wrong_name(scope[1:-1]) and len(body.key) > len(scope)

    def _count_evicted(self, suffix: str, objects: list[Object]) -> None:
        super()._count_evicted(suffix, objects)
        if suffix and objects:  # once, as they leave memory
            self.tenants.owner(objects[0]).evicted += len(objects)
