"""Filling the directory from what a tier says it holds: values of an earlier master, or of an earlier server.

The rules are those of `recovery`: the highest sequence number of a key wins, what was removed or put again while the
tier was away stays dead.  A value that is in memory already gets its copy back."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator

from mooncake.master.catalog import Catalog
from mooncake.master.granting import Granting
from mooncake.master.objects import HARD_PIN, Object, with_checksum
from mooncake.master.pool import Segment
from mooncake.master.tombstones import Tombstones
from mooncake.rpc.disk_messages import DiskRecord

log = logging.getLogger("mooncake.master")

_AT_ONCE = 200  # records in one step


class DiskRecovery:
    """Takes announced values in.  (Soft pins are about memory, and are over.)"""

    def __init__(
        self,
        catalog: Catalog,
        granting: Granting,
        tombstones: Tombstones,
        clock: Callable[[], float],
    ) -> None:
        self._catalog = catalog
        self._granting = granting
        self._tombstones = tombstones
        self._clock = clock

    def announce(self, segment: Segment, records: list[DiskRecord], last: bool) -> Iterator[None]:
        """Take `records` in, in steps; after the `last` ones values may be written to the tier."""
        tier = segment.tier
        if tier is None or tier.filled:
            return
        for at in range(0, len(records), _AT_ONCE):
            now = self._clock()
            segment.heard = now
            self._granting.expect_others(now)
            for record in records[at : at + _AT_ONCE]:
                if segment.tier is not tier or not segment.mounted:
                    return
                self._take(segment, record, now)
            yield
        if last and segment.tier is tier:
            tier.filled = True
            self._tombstones.undelivered.pop(tier.number, None)
            log.info("segment_name=%s, action=mount_local_disk, path=%s", segment.name, tier.path)

    def _take(self, segment: Segment, record: DiskRecord, now: float) -> None:
        seq, body, disks = record.seq, self._catalog.known_as(record.body), self._catalog.disks
        if not 0 < seq < 1 << 62 or not body.key or body.size <= 0:
            log.warning("segment %s: a value on its disk is not believed: key %r", segment.name, body.key[:200])
            disks.drop(segment, seq)
            return
        self._granting.skip_to(seq)
        version = body.version or seq  # the value's, if its record in memory was a later copy
        existing = self._catalog.objects.get(body.key)
        assert segment.tier is not None
        if existing is not None and existing.size == body.size and disks.attach(existing, segment, seq, version):
            self._catalog.changed(existing)
            return
        if (
            (existing is not None and existing.seq >= version)
            or self._tombstones.kills(segment.tier.number, seq, body.key, body.group, seq, version)
            or not self._catalog.takes(body)
        ):
            disks.drop(segment, seq)
            return
        if existing is not None:
            self._catalog.forget(existing, now)
        obj = Object(key=body.key, size=body.size, seq=version, flags=HARD_PIN if body.hard_pin else 0)
        obj = with_checksum(obj, body.checksum)
        obj.client = sys.intern(body.client)  # one text for all values of a client
        disks.attach(obj, segment, seq, version)
        self._catalog.insert(obj, body.group, 0.0, now)
