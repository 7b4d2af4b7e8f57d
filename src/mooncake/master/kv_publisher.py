"""The publisher of KV events on ZeroMQ: the master's loop encodes them, in steps; ZeroMQ's own thread sends them.

A message has three parts: an empty topic, a number (unsigned, 8 bytes, big end first), and MessagePack of
[milliseconds since 1970, [event, ...], 0], each event a map (`_Wire`).  Messages are numbered from 0; where events were
lost to a full queue, one number is left out.  Whoever reads too slowly loses messages at ZeroMQ's own limit: nobody is
waited for.
"""

from __future__ import annotations

import asyncio
import logging
import time

import msgspec
import zmq

from mooncake.errors import ConfigError
from mooncake.master.catalog import Catalog
from mooncake.master.config import MasterConfig
from mooncake.master.counters import Counters
from mooncake.master.kv_events import CLEARED, REMOVED, STORED, KvEvent, KvEvents
from mooncake.master.kv_replay import KvReplay
from mooncake.master.tenants.names import DEFAULT, split

log = logging.getLogger("mooncake.master")

MOST_IN_BATCH = 64
_GATHER_S = 0.003  # events of this long go together
_SETTLE_S = 0.5  # after the start: subscribers of an earlier master come back ten times a second
_STEP_S = 0.001
_MOST_UNREAD = 1000  # messages kept for each subscriber, of up to 25 KB
_LEGACY = {STORED: "BlockStored", REMOVED: "BlockRemoved", CLEARED: "AllBlocksCleared"}


class _Wire(msgspec.Struct, gc=False, kw_only=True):
    """One event, as a map in this order.  What is always nil belongs to other programs' events of this form."""

    event_id: int
    timestamp: int
    event_type: str
    type: str | msgspec.UnsetType
    model_name: None = None
    block_size: None = None
    additional_salt: None = None
    lora_name: None = None
    tenant_id: str = DEFAULT
    backend_id: str
    group_id: str
    medium: str | None
    dp_rank: None = None
    object_key: str | msgspec.UnsetType | None
    parent_hash: None = None
    token_ids: None = None
    seq_hashes: list[int]
    block_hashes: list[int] | msgspec.UnsetType
    base_block_idx: int | None


class KvPublisher:
    """Publishes what is in `events`.  `endpoint` is bound: ConfigError if it cannot be."""

    def __init__(
        self,
        events: KvEvents,
        counters: Counters,
        endpoint: str,
        backend_id: str,
        *,
        legacy: bool,
        with_keys: bool,
        tenants: bool = False,
        replay: KvReplay | None = None,
    ) -> None:
        self._events = events
        self._counters = counters
        self._backend_id = backend_id
        self._legacy = legacy
        self._with_keys = with_keys
        self._tenants = tenants
        self._replay = replay
        self._loop = asyncio.get_running_loop()
        self._encode = msgspec.msgpack.Encoder().encode
        self._begin = self._loop.time() + _SETTLE_S
        self._sequence = 0
        self._expected = 0  # number of the next event, if none is lost
        self._timer: asyncio.Handle | None = None
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        self._socket.set_hwm(_MOST_UNREAD)
        self._socket.linger = 0
        try:
            self._socket.bind(endpoint)
        except (zmq.ZMQError, ValueError) as error:
            self.close()
            raise ConfigError(
                f"KV events cannot be published at {endpoint!r} ({getattr(error, 'strerror', None) or error}): "
                f"set --kv_events_bind_endpoint to a free address such as tcp://0.0.0.0:5557."
            ) from None
        events.on_first = self._wake
        if events:
            self._wake()

    @property
    def endpoint(self) -> str:
        """Where it is bound, with the real port."""
        return self._socket.get_string(zmq.LAST_ENDPOINT)

    def close(self) -> None:
        self._events.on_first = lambda: None
        if self._timer is not None:
            self._timer.cancel()
        self._socket.close()
        self._context.term()
        if self._replay is not None:
            self._replay.close()

    def _wake(self) -> None:
        self._timer = self._loop.call_at(max(self._loop.time() + _GATHER_S, self._begin), self._publish)

    def _publish(self) -> None:
        """Send what waits, as far as one step of the loop goes."""
        stop = time.monotonic() + _STEP_S
        while self._events:
            self.send(self._events.take(MOST_IN_BATCH))
            if time.monotonic() >= stop:
                break
        self._timer = self._loop.call_soon(self._publish) if self._events else None

    def send(self, events: list[KvEvent]) -> None:
        """One message, of at most MOST_IN_BATCH events."""
        if events[0].number != self._expected:
            self._sequence += 1
            if self._replay is not None:
                self._replay.lost()
        self._expected = events[-1].number + 1
        batch = self._encode((int(time.time() * 1000), [self._wire(event) for event in events], 0))
        number = self._sequence.to_bytes(8, "big")
        if self._replay is not None:
            self._replay.sent(self._sequence, batch)
        self._sequence += 1
        self._socket.send_multipart((b"", number, batch), zmq.NOBLOCK)  # a PUB socket drops rather than block
        self._counters["mooncake_kv_events_batches_total"] += 1
        self._counters["mooncake_kv_events_published_total"] += len(events)

    def _wire(self, event: KvEvent) -> _Wire:
        hashes: list[int] = []
        tenant, key, group = DEFAULT, event.key, event.group
        if self._tenants and key:
            tenant, key = split(key)
            _, group = split(group)
        if event.kind != CLEARED:
            value = hash_in(key)
            if value is None:
                self._counters["mooncake_kv_events_unparsed_keys_total"] += 1
            else:
                hashes = [value]
        return _Wire(
            event_id=event.number,
            timestamp=event.time_ms,
            event_type=event.kind,
            type=_LEGACY[event.kind] if self._legacy else msgspec.UNSET,
            tenant_id=tenant,
            backend_id=self._backend_id,
            group_id=group,
            medium=event.medium or None,
            object_key=(key or None) if self._with_keys else msgspec.UNSET,
            seq_hashes=hashes,
            block_hashes=list(map(_signed, hashes)) if self._legacy else msgspec.UNSET,
            base_block_idx=0 if event.kind == STORED else None,
        )


def publish_events(config: MasterConfig, counters: Counters, catalog: Catalog) -> KvPublisher:
    """From now on, what happens in `catalog`.  Raises ConfigError."""
    catalog.events = KvEvents(config.kv_events_queue_capacity, counters)
    replay = None
    if config.kv_events_replay_endpoint:
        replay = KvReplay(catalog.events, catalog, counters, config.kv_events_replay_endpoint)
    publisher = KvPublisher(
        catalog.events, counters, config.kv_events_endpoint, config.kv_events_backend_id,
        legacy=config.kv_events_legacy, with_keys=config.kv_events_with_keys,
        tenants=config.tenant_quotas is not None, replay=replay,
    )  # fmt: skip
    log.info("KV events are published at %s", publisher.endpoint)
    return publisher


def hash_in(key: str) -> int | None:
    """The hash that a key is: a number below 2**64, decimal or 0x and hexadecimal; None if it is none."""
    if not key.isalnum() or not key.isascii():
        return None
    try:
        value = int(key, 16 if key[:2] in ("0x", "0X") else 10)
    except ValueError:
        return None
    return value if value < 1 << 64 else None


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
