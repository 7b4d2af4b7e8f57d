"""Puts: room for a batch of keys, now or as soon as something has left.

A `Wish` is one PutStart on its way.  It is granted as a whole if the room is there (so that a batch lies in one run);
else units are evicted for it, their owners confirm, and it is tried again.  Wishes wait in one line, so that an early
large one is not starved by later small ones; at its deadline a wish takes what fits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import count
from random import randrange

from mooncake.errors import ErrorCode
from mooncake.master.catalog import Catalog
from mooncake.master.config import MasterConfig
from mooncake.master.counters import Counters
from mooncake.master.membership import Client
from mooncake.master.objects import (
    HARD_PIN,
    MOST_FLAT_SLOTS,
    REPLICATING,
    Object,
    Replica,
    flat_slots,
    granules,
    in_memory,
    lay,
    parts,
)
from mooncake.master.placement import Item, order, place_batch, place_one
from mooncake.master.pool import Pool
from mooncake.master.puts import Put, Puts
from mooncake.rpc.messages import Grant, Kept, PutOptions
from mooncake.rpc.record_messages import Part
from mooncake.transfer.table import slots_needed

SEQ_BITS = 19  # sequence numbers start at term << SEQ_BITS: higher than any earlier master's, yet below 2**60
EVICT_AT_ONCE = 500  # units looked at in one step (2-3 us each)
SERVED_AT_ONCE = 256  # keys of wishes in one step (4-8 us each)
_ENABLE = 1  # SoftPinAction
_OTHERS_S = 3.0  # segment servers notice a lost master within it, and try again ten times a second
_TIERS_S = 10.0  # so long after a segment's values those on its server's disk may follow
_SIZES = 4096  # how many different sizes share their int


class Wish:
    """Some keys that want room.  `answers`: a code or a Grant for each key; `lacking`: indexes without either."""

    __slots__ = (
        "answers",
        "client",
        "deadline",
        "eager",
        "groups",
        "keys",
        "lacking",
        "on_settled",
        "options",
        "sizes",
    )

    def __init__(
        self,
        client: Client,
        keys: list[str],
        sizes: list[int],
        options: PutOptions | None,
        groups: list[str],
        deadline: float,
    ) -> None:
        self.client = client
        self.groups = groups  # one a key, or none
        self.keys = keys
        self.sizes = sizes
        self.options = options
        self.deadline = deadline
        self.answers: list[int | Grant] = [0] * len(keys)
        self.lacking = list(range(len(keys)))
        self.on_settled: Callable[[], None] | None = None
        self.eager = False

    @property
    def settled(self) -> bool:
        return not self.lacking

    @property
    def overwrites(self) -> bool:
        return self.options is not None and self.options.upsert

    def refuse(self, code: ErrorCode) -> None:
        """Answer all keys that have no answer yet."""
        for i in self.lacking:
            self.answers[i] = int(code)
        self.lacking = []


class Granting:
    """Opens puts, and makes room for them."""

    def __init__(self, config: MasterConfig, counters: Counters, pool: Pool, catalog: Catalog, puts: Puts) -> None:
        self._config = config
        self._counters = counters
        self._pool = pool
        self._catalog = catalog
        self._puts = puts
        self._waiting: deque[Wish] = deque()
        self._evicting = 0  # bytes that are still to go ahead of demand
        self._calm_until = 0.0  # no eviction ahead of demand before
        self._sizes: dict[int, int] = {}
        self._turns = count(randrange(1 << 16))
        self.spare: Callable[[int, float, float], int] = lambda room, latest_start, now: 0  # see Recovery.spare
        self.last_seq = pool.term << SEQ_BITS
        self._seqs = count(self.last_seq + 1)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def busy(self) -> bool:
        """Whether there is something to do before anything else happens."""
        return bool(self._waiting or self._evicting)

    def skip_to(self, seq: int) -> None:
        """From now on use higher sequence numbers than `seq`."""
        if seq > self.last_seq:
            self._seqs = count(seq + 1)
            self.last_seq = seq

    def next_seq(self) -> int:
        """A sequence number that is higher than all before."""
        self.last_seq = next(self._seqs)
        return self.last_seq

    def is_open(self, key: str) -> bool:
        """Whether a put of `key` is in progress."""
        return key in self._puts.by_key

    # -- granting

    def ask(self, wish: Wish, now: float) -> None:
        """Grant `wish`, or put it into the line; it is settled in the end."""
        refusal = self._refusal(wish.options)
        if refusal is not None:
            wish.refuse(refusal)
            return
        if not self._waiting and self._grant(wish, now):
            self._check_watermark(now)
            return
        self._waiting.append(wish)
        self.serve(now)

    def grant_one(self, client: Client, key: str, size: int, now: float, *, eager: bool) -> int | Grant | None:
        """The answer to a put of one value without options, if the first segment tried has room for it and nobody
        waits; None: ask with a Wish.  Small puts live by this: it takes a third of the time."""
        placeable = self._pool.placeable
        if self._waiting or not placeable or not key or size <= 0 or self._config.allocation_strategy != "random":
            return None
        if self._catalog.objects.get(key) is not None:
            return int(ErrorCode.OBJECT_ALREADY_EXISTS)
        if key in self._puts.by_key:
            return None
        segment = placeable[next(self._turns) % len(placeable)]
        start = segment.allocator.allocate(size)
        if start is None:
            return None
        count = slots_needed(key, "", client.name, 1)
        slots = segment.slots.take(count) if count <= MOST_FLAT_SLOTS else None
        if slots is None or slots[-1] - slots[0] >= count:
            segment.allocator.release(start, size)
            if slots is not None:
                segment.slots.give(slots)
            return None
        seq = self.last_seq = next(self._seqs)
        size = self._shared(size)
        obj = Object(
            key=key, size=size, seq=seq, segment=segment, offset=start, slots=flat_slots(slots[0], count),
            client=client.name,
        )  # fmt: skip
        self._puts.add(Put(obj, client, "", now, 0.0))
        if eager:
            self._puts.eager[key] = now
        self._check_watermark(now)
        return Grant(seq, [[Part(segment.number, slots, [start, size])]])

    def _refusal(self, options: PutOptions | None) -> ErrorCode | None:
        if options is None:
            return None
        ttl = options.soft_pin_ttl_ms
        pinning = options.soft_pin_action == _ENABLE
        if ttl is not None and not (pinning and 0 <= ttl <= self._config.max_soft_pin_ttl_ms):
            return ErrorCode.INVALID_PARAMS
        return None if options.replica_num > 0 else ErrorCode.INVALID_PARAMS

    def serve(self, now: float) -> bool:
        """Go on with the line: grant, make room, or give up.  True: there is more to do at once."""
        waiting, served = self._waiting, 0
        while waiting:
            wish = waiting[0]
            if served >= SERVED_AT_ONCE:
                return True
            served += len(wish.keys)
            if not self._grant(wish, now):
                if now < wish.deadline and self._pool.segments:
                    more = self._make_room(wish, now)
                    if not self._grant(wish, now):
                        return more
                else:
                    self._grant_what_fits(wish, now)
            waiting.popleft()
            if wish.on_settled is not None:
                wish.on_settled()
        return False

    def _grant(self, wish: Wish, now: float) -> bool:
        """All keys that may be put, or nothing."""
        self._refuse_taken(wish, now)
        if not wish.lacking:
            return True
        sizes = wish.sizes
        need = sum([granules(sizes[i]) for i in wish.lacking])
        copies, options = self._copies(wish), wish.options
        if need * copies > self._pool.room()[0] or not self._pool.placeable:
            return False
        ordered = order(
            self._pool.placeable, self._config.allocation_strategy, options, wish.client.host, need * copies
        )
        items = [self._item(wish, i) for i in wish.lacking]
        placed = place_batch(ordered, items, copies) if len(items) > 1 else None
        if placed is None:
            placed = [place_one(ordered, item, copies) for item in items]
        lacking = []
        for i, replicas in zip(wish.lacking, placed, strict=True):
            if replicas:
                wish.answers[i] = self._open(wish, i, replicas, now)
            else:
                lacking.append(i)
        wish.lacking = lacking
        return not lacking

    def _grant_what_fits(self, wish: Wish, now: float) -> None:
        self._refuse_taken(wish, now)
        ordered = order(self._pool.placeable, self._config.allocation_strategy, wish.options, wish.client.host, 0)
        failed = []
        for i in wish.lacking:
            replicas = place_one(ordered, self._item(wish, i), self._copies(wish)) if ordered else ()
            if replicas:
                wish.answers[i] = self._open(wish, i, replicas, now)
            else:
                failed.append(i)
        wish.lacking = failed
        if failed:
            self._counters["master_put_start_alloc_failures_total"] += len(failed)
            wish.refuse(ErrorCode.NO_AVAILABLE_HANDLE)

    def _refuse_taken(self, wish: Wish, now: float) -> None:
        """Answer the keys that cannot be put whatever room there is."""
        keys, sizes, by_key = wish.keys, wish.sizes, self._puts.by_key
        capacity, overwrites = self._pool.capacity, wish.overwrites
        lacking = []
        seen: set[str] = set()
        for i in wish.lacking:
            key = keys[i]
            if not key or sizes[i] <= 0:
                wish.answers[i] = int(ErrorCode.INVALID_PARAMS)
                continue
            if key in seen or (
                not overwrites and (self._catalog.objects.get(key) is not None or self._is_open(by_key.get(key), now))
            ):
                wish.answers[i] = int(ErrorCode.OBJECT_ALREADY_EXISTS)
                continue
            if overwrites and (refusal := self._pre_empt(wish, i, now)):
                wish.answers[i] = int(refusal)
                continue
            seen.add(key)
            if sizes[i] > capacity:  # nothing is evicted for what can never be granted
                self._counters["master_put_start_alloc_failures_total"] += 1
                wish.answers[i] = int(ErrorCode.NO_AVAILABLE_HANDLE)
                continue
            lacking.append(i)
        wish.lacking = lacking

    def _is_open(self, put: Put | None, now: float) -> bool:
        """Whether this put keeps its key from others; one that does so no longer is discarded."""
        if put is None:
            return False
        if now - put.started < self._config.put_start_discard_timeout_s:
            return True
        self._counters["master_put_start_discard_cnt"] += 1
        self.revoke(put, now)
        return False

    def _pre_empt(self, wish: Wish, i: int, now: float) -> ErrorCode:
        """An upsert comes before a put of its key that is not finished; OK, or why there may be no upsert."""
        key = wish.keys[i]
        existing = self._catalog.objects.get(key)
        if existing is not None and wish.groups:
            group = "" if existing.group is None else existing.group.name
            if wish.groups[i] != group:
                return ErrorCode.INVALID_PARAMS
        if existing is not None and existing.flags & REPLICATING:
            return ErrorCode.OBJECT_HAS_REPLICATION_TASK
        put = self._puts.by_key.get(key)
        if put is not None:
            self.revoke(put, now)
        return ErrorCode.OK

    def _kept(self, wish: Wish, i: int, now: float) -> Kept | None:
        """What an upsert leaves as it is."""
        existing = self._catalog.objects.get(wish.keys[i]) if wish.overwrites else None
        if existing is None or wish.options is None:
            return None
        pinned_s = 0.0 if wish.options.soft_pin_action else self._catalog.pinned_until(existing) - now
        group = "" if existing.group is None else existing.group.name
        hard = wish.options.hard_pin or bool(existing.flags & HARD_PIN)
        return Kept(group, hard, max(0, int(pinned_s * 1000)))

    def _group_of(self, wish: Wish, i: int) -> str:
        if wish.groups:
            return wish.groups[i]
        existing = self._catalog.objects.get(wish.keys[i]) if wish.overwrites else None
        return "" if existing is None or existing.group is None else existing.group.name

    def _copies(self, wish: Wish) -> int:
        wanted = 1 if wish.options is None else wish.options.replica_num
        return max(1, min(wanted, len(self._pool.placeable)))

    def _item(self, wish: Wish, i: int) -> Item:
        return Item(wish.keys[i], wish.sizes[i], self._group_of(wish, i), wish.client.name)

    def _open(self, wish: Wish, i: int, replicas: tuple[Replica, ...], now: float) -> Grant:
        options = wish.options
        seq = self.last_seq = next(self._seqs)
        obj = Object(key=wish.keys[i], size=self._shared(wish.sizes[i]), seq=seq, client=wish.client.name)
        lay(obj, replicas)
        group, kept = self._group_of(wish, i), self._kept(wish, i, now)
        soft_pin_s = 0.0
        if options is not None:
            if options.hard_pin:
                obj.flags = HARD_PIN
            if options.soft_pin_action == _ENABLE:
                soft_pin_s = self.soft_pin_s(options.soft_pin_ttl_ms)
            if kept is not None:
                obj.flags |= HARD_PIN if kept.hard_pin else 0
                soft_pin_s = soft_pin_s or kept.soft_pin_ms / 1000
            if len(replicas) < options.replica_num:
                self._counters["master_put_start_partial_allocations_total"] += 1
        self._puts.add(Put(obj, wish.client, group, now, soft_pin_s))
        if wish.eager:
            self._puts.eager[obj.key] = now
        if group:
            self._catalog.group(group).open += 1
        return Grant(
            seq,
            [
                [Part(part.segment.number, list(part.slots), list(part.extents)) for part in replica]
                for replica in replicas
            ],
            kept,
        )

    def soft_pin_s(self, ttl_ms: int | None) -> float:
        """How long a soft pin with this ttl lasts."""
        config = self._config
        return (config.soft_pin_ttl_ms if ttl_ms is None else min(ttl_ms, config.max_soft_pin_ttl_ms)) / 1000

    def _shared(self, size: int) -> int:
        """The same number, as one object for all values of that size."""
        shared = self._sizes.get(size)
        if shared is not None:
            return shared
        if len(self._sizes) < _SIZES:
            self._sizes[size] = size
        return size

    def close(self, put: Put) -> None:
        """`put` is over, one way or the other."""
        self._puts.remove(put)
        if put.group:
            group = self._catalog.group(put.group)
            group.open -= 1
            self._catalog.close_group(group)

    def revoke(self, put: Put, now: float) -> None:
        """Forget an open put.  Its room comes back when the owners say that its writer is done."""
        self.close(put)
        if put.group and (group := self._catalog.groups.get(put.group)) is not None:
            self._catalog.settle(group, now)
        for part in parts(put.obj):
            self._pool.kill(part, put.obj.seq, now, clean=False)

    # -- making room

    def _make_room(self, wish: Wish, now: float) -> bool:
        """Start to free what `wish` lacks, so far as it does not come free by itself.  True: not all yet."""
        need = sum(granules(wish.sizes[i]) for i in wish.lacking) * self._copies(wish)
        if need > self._pool.reachable(now):
            return False  # evicting all would not help: wait for what is held back, and evict nothing in vain
        free, coming = self._pool.room()
        if free >= need:  # there were bytes but no slots, or not on enough segments
            free = 0
        lack = need - free - coming
        freed = self._evict(lack, now, EVICT_AT_ONCE, breaking=True)
        if lack > 0 and not freed and wish.overwrites:  # nothing else may go: the values that it replaces go first
            freed = self._drop_overwritten(wish, now)
        return 0 < freed < lack

    def _drop_overwritten(self, wish: Wish, now: float) -> int:
        """Forget the values that `wish` replaces; how many bytes will come free."""
        freed = 0
        for i in wish.lacking:
            existing = self._catalog.objects.get(wish.keys[i])
            if existing is not None and in_memory(existing):
                freed += sum(part.taken for part in parts(existing))
                self._catalog.forget(existing, now)
        return freed

    def _evict(self, room: int, now: float, limit: int, *, breaking: bool) -> int:
        if room <= 0:
            return 0
        freed = self._catalog.evict(room, now, limit)
        if breaking and freed < room:
            freed += self.spare(room - freed, now - self._config.break_lease_after_s, now)
        if breaking and freed < room:
            freed += self._catalog.break_leases(room - freed, now, limit)
        if breaking and freed < room:
            freed += self._catalog.evict_fresh(room - freed, now, limit)
        self._count_attempt(freed)
        return freed

    def _count_attempt(self, freed: int) -> None:
        for suffix in ("total", "mem"):
            self._counters["master_attempted_evictions_" + suffix] += 1
            if freed:
                self._counters["master_successful_evictions_" + suffix] += 1

    def expect_others(self, now: float) -> None:
        """A segment with values is coming back, so others may follow: what is mounted now says little about how full
        the pool is, or which values are on disk too, and nothing is evicted ahead of demand."""
        self._calm_until = max(self._calm_until, now + (_TIERS_S if self._config.enable_offload else _OTHERS_S))
        self._evicting = 0

    def stay_calm(self, until: float) -> None:
        """What is evicted now does not come free before: evict nothing ahead of demand."""
        self._calm_until = max(self._calm_until, until)

    def _check_watermark(self, now: float) -> None:
        if not self._evicting and now >= self._calm_until:
            above = self._pool.fill() - self._config.high_watermark
            if above > 0:
                share = max(self._config.eviction_ratio, above + self._config.eviction_ratio)
                self._evicting = int(share * self._pool.used)

    def evict_ahead(self, now: float) -> bool:
        """One step of eviction ahead of demand; whether another is due."""
        self._check_watermark(now)
        if not self._evicting:
            return False
        freed = self._evict(self._evicting, now, EVICT_AT_ONCE, breaking=False)
        self._evicting = max(0, self._evicting - freed) if freed else 0
        return self._evicting > 0
