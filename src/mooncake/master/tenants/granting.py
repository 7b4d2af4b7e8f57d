"""Granting with tenants: every put is held against its tenant's limit, and nobody waits for another's.

    over its own limit       its own units go, the least useful first; if none may go, TENANT_QUOTA_EXCEEDED
    inside, but no room      units of those go that are over their limits (a segment was lost); then its own
    ahead of demand          as in a pool of its own, as large as its limit

A wish that waits holds up those of its own tenant, and keeps from others only the bytes that it waits for.
"""

from __future__ import annotations

from collections import deque

from mooncake.errors import ErrorCode
from mooncake.master.config import MasterConfig
from mooncake.master.counters import Counters
from mooncake.master.granting import SERVED_AT_ONCE, Granting, Wish
from mooncake.master.membership import Client
from mooncake.master.objects import Replica, granules
from mooncake.master.pool import Pool
from mooncake.master.puts import Put, Puts
from mooncake.master.tenants.catalog import TenantCatalog
from mooncake.master.tenants.names import scope_in
from mooncake.master.tenants.registry import Tenant, Tenants, taken
from mooncake.rpc.messages import Grant

_TRIM_S = 0.005  # between two looks at all tenants
_EVICT_AT_ONCE = 250  # units looked at in one step (6-8 us each)


class TenantGranting(Granting):
    """`reserved` of every tenant is, after each step, what its puts in progress take."""

    def __init__(
        self,
        config: MasterConfig,
        counters: Counters,
        pool: Pool,
        catalog: TenantCatalog,
        puts: Puts,
        tenants: Tenants,
    ) -> None:
        super().__init__(config, counters, pool, catalog, puts)
        self._tenants = tenants
        self._next_trim = 0.0
        self._spent = 0  # keys that this step of the loop has looked at
        # One look at all that wait takes as many steps as it needs: so many are still to be looked at, and
        self._unseen = 0
        self._seen: deque[Wish] = deque()  # these wait on,
        self._stuck: set[str] = set()  # and with them all of these scopes,
        self._awaited = 0  # for so many bytes.
        self._more = False
        self._trimmed = 0  # tenants, counted on and on

    @property
    def waiting(self) -> int:
        return len(self._waiting) + len(self._seen)

    # -- account

    def grant_one(self, client: Client, key: str, size: int, now: float, *, eager: bool) -> int | Grant | None:
        tenant = self._tenants.of(key)
        if tenant is None or size <= 0 or tenant.held + granules(size) > self._tenants.limit(tenant):
            return None
        answer = super().grant_one(client, key, size, now, eager=eager)
        if isinstance(answer, Grant):
            tenant.reserved += granules(size)
        return answer

    def _open(self, wish: Wish, i: int, replicas: tuple[Replica, ...], now: float) -> Grant:
        grant = super()._open(wish, i, replicas, now)
        put = self._puts.by_seq[grant.seq]
        self._tenants.owner(put.obj).reserved += taken(put.obj)
        return grant

    def close(self, put: Put) -> None:
        self._tenants.owner(put.obj).reserved -= taken(put.obj)
        super().close(put)

    def revoke(self, put: Put, now: float) -> None:
        self._pool.account = self._tenants.owner(put.obj)
        super().revoke(put, now)
        self._pool.account = None

    # -- granting

    def ask(self, wish: Wish, now: float) -> None:
        refusal = self._refusal(wish.options)
        if refusal is not None:
            wish.refuse(refusal)
            return
        self._waiting.append(wish)
        self.serve(now)

    def serve(self, now: float) -> bool:
        self._spent = 0
        if not self._unseen:
            self._unseen, self._awaited, self._more = len(self._waiting), 0, False
            self._stuck.clear()
        while self._unseen:
            if self._spent >= SERVED_AT_ONCE:
                return True
            self._unseen -= 1
            wish = self._waiting.popleft()
            if self._serve_one(wish, now):
                if wish.on_settled is not None:
                    wish.on_settled()
            else:
                self._seen.append(wish)
        self._more |= bool(self._waiting)  # these came meanwhile
        self._waiting.extendleft(reversed(self._seen))
        self._seen.clear()
        return self._more

    def _serve_one(self, wish: Wish, now: float) -> bool:
        """Whether it is settled now."""
        scope = _scope(wish)
        if scope in self._stuck:
            return False
        self._spent += len(wish.keys)
        if self._grant(wish, now):
            return True
        if now >= wish.deadline or not self._pool.segments:
            self._give_up(wish, now)
            return True
        self._more |= self._make_room(wish, now)
        if self._grant(wish, now):
            return True
        self._stuck.add(scope)
        self._awaited += self._need(wish)
        return False

    def _grant(self, wish: Wish, now: float) -> bool:
        self._refuse_taken(wish, now)
        if not wish.lacking:
            return True
        tenant = self._tenants.of(_scope(wish))
        if tenant is None or tenant.quota is None:
            wish.refuse(ErrorCode.TENANT_NOT_REGISTERED)
            return True
        if self._pool.placeable:
            self._refuse_beyond(wish, tenant, self._tenants.limit(tenant))
        if not wish.lacking:
            return True
        if self._excess(wish, tenant) > 0 or self._need(wish) + self._awaited > self._pool.room()[0]:
            return False
        return super()._grant(wish, now)

    def _give_up(self, wish: Wish, now: float) -> None:
        """Its time is over: it gets what fits."""
        tenant = self._tenants.of(_scope(wish))
        if tenant is not None and self._pool.placeable:
            self._refuse_beyond(wish, tenant, self._tenants.limit(tenant) - tenant.held)
        self._grant_what_fits(wish, now)

    def _need(self, wish: Wish) -> int:
        return sum([granules(wish.sizes[i]) for i in wish.lacking]) * self._copies(wish)

    def _excess(self, wish: Wish, tenant: Tenant) -> int:
        """By how many bytes the tenant would be over its limit."""
        return tenant.held + self._need(wish) - self._tenants.limit(tenant)

    def _refuse_beyond(self, wish: Wish, tenant: Tenant, room: int) -> None:
        """Answer those keys that do not fit `room` bytes, which is what the tenant may have for all."""
        copies, lacking = self._copies(wish), []
        for i in wish.lacking:
            need = granules(wish.sizes[i]) * copies
            if need <= room:
                room -= need
                lacking.append(i)
            else:
                wish.answers[i] = int(ErrorCode.TENANT_QUOTA_EXCEEDED)
                tenant.refused += 1
        wish.lacking = lacking

    # -- making room

    def _make_room(self, wish: Wish, now: float) -> bool:
        tenant = self._tenants.of(_scope(wish))
        if tenant is None:
            return False
        excess = self._excess(wish, tenant)
        if excess > 0:
            return self._shrink(wish, tenant, excess, now)
        need = self._need(wish)
        if need > self._pool.reachable(now):
            return False
        free, coming = self._pool.room()
        free -= self._awaited
        lack = need - coming - (free if free < need else 0)
        if lack <= 0:
            return False
        for other, most in self._tenants.over():
            if freed := self._evict_of(other, min(lack, most), now, breaking=True):
                return freed < lack
        freed = self.spare(lack, now - self._config.break_lease_after_s, now)
        freed = freed or self._evict_of(tenant, lack, now, breaking=True)
        if not freed and wish.overwrites:
            freed = self._drop_overwritten(wish, now)
        return 0 < freed < lack

    def _shrink(self, wish: Wish, tenant: Tenant, excess: int, now: float) -> bool:
        """Evict what is the tenant's own; if none of it may go, the wish is over for what does not fit."""
        lack = excess - tenant.leaving - tenant.quarantined
        if lack <= 0:
            return False  # it is being written to disk, or its servers are about to confirm
        freed = self._evict_of(tenant, lack, now, breaking=True)
        if not freed and wish.overwrites:
            freed = self._drop_overwritten(wish, now)
        if not freed and not tenant.leaving and not tenant.quarantined:
            self._refuse_beyond(wish, tenant, self._tenants.limit(tenant) - tenant.held)
        return 0 < freed < lack

    def _evict_of(self, tenant: Tenant, room: int, now: float, *, breaking: bool) -> int:
        """One step of evicting units of `tenant`: at most two tries, the second one among what is leased or was just
        put."""
        self._tenants.turn = tenant
        self._spent += SERVED_AT_ONCE  # nothing more in this step
        catalog = self._catalog
        freed = catalog.evict(room, now, _EVICT_AT_ONCE)
        if breaking and freed < room:
            freed += catalog.break_leases(room - freed, now, _EVICT_AT_ONCE)
            if freed < room:
                freed += catalog.evict_fresh(room - freed, now, _EVICT_AT_ONCE)
        self._tenants.turn = None
        self._count_attempt(freed)
        return freed

    def _check_watermark(self, now: float) -> None:
        """See `evict_ahead`."""

    def expect_others(self, now: float) -> None:
        super().expect_others(now)
        for tenant in self._tenants:
            tenant.evicting = 0

    def evict_ahead(self, now: float) -> bool:
        if now < self._calm_until or (not self._evicting and now < self._next_trim):
            return False
        self._next_trim = now + _TRIM_S
        self._spent = 0
        more = False
        limits = self._tenants.limits()
        first = self._trimmed % max(1, len(limits))
        for tenant, limit in (*limits[first:], *limits[:first]):
            if self._spent >= SERVED_AT_ONCE:
                more = True
                break
            self._trimmed += 1
            if tenant.quota is not None:
                more |= self._trim(tenant, limit, now)
        self._evicting = int(more)
        return more

    def _trim(self, tenant: Tenant, limit: int, now: float) -> bool:
        if not tenant.evicting:
            stays = tenant.taken - tenant.leaving
            above = stays - self._config.high_watermark * limit
            if above <= 0 or not limit:
                return False
            ratio = self._config.eviction_ratio
            tenant.evicting = int(max(ratio, above / limit + ratio) * stays)
        freed = self._evict_of(tenant, tenant.evicting, now, breaking=False)
        tenant.evicting = max(0, tenant.evicting - freed) if freed else 0
        return tenant.evicting > 0


def _scope(wish: Wish) -> str:
    return next((scope_in(key) for key in wish.keys if key), "")
