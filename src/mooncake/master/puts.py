"""The puts in progress: granted, and neither ended nor revoked.

Their keys are taken but cannot be read.  A put that is too old may be discarded by a newer one of its key, and a much
too old one is forgotten; its extents come back in any case only with the owner's word that its writer is done.
"""

from __future__ import annotations

import msgspec

from mooncake.master.membership import Client
from mooncake.master.objects import Object, with_checksum

_REMEMBERED = 4096
_EAGER_S = 0.1  # how long an eager put's PutEnd is waited for


class Put(msgspec.Struct, gc=False, eq=False):
    """`soft_pin_s`: how long the value will be soft-pinned from its end on; 0 not at all."""

    obj: Object
    client: Client
    group: str
    started: float
    soft_pin_s: float


class Puts:
    """Open puts by sequence number (in the order of their starts) and by key; and who ended the last few thousand."""

    def __init__(self) -> None:
        self.by_seq: dict[int, Put] = {}
        self.by_key: dict[str, Put] = {}
        self.eager: dict[str, float] = {}  # key → start of open puts whose callers do not wait for PutEnd's reply
        self._ended: dict[int, str] = {}
        self._ended_before: dict[int, str] = {}

    def add(self, put: Put) -> None:
        seq = put.obj.seq
        self.by_seq[seq] = put
        self.by_key[put.obj.key] = put
        put.client.puts.add(seq)

    def remove(self, put: Put) -> None:
        seq, key = put.obj.seq, put.obj.key
        del self.by_seq[seq]
        if self.by_key.get(key) is put:
            del self.by_key[key]
            self.eager.pop(key, None)
        put.client.puts.discard(seq)

    def eager_met(self, keys: list[str] | None, now: float) -> list[Put]:
        """The open eager puts of these keys (None: of any key): their PutEnds are on their way."""
        eager = self.eager
        if keys is not None and eager.keys().isdisjoint(keys):
            return []
        met = []
        for key in list(eager) if keys is None else keys:
            started = eager.get(key)
            if started is not None:
                if now - started < _EAGER_S:
                    met.append(self.by_key[key])
                else:
                    del eager[key]  # its writer is slow or dead: an open put like any other
        return met

    def note_checksums(self, seqs: list[int], checksums: list[int], client: Client) -> None:
        """What the values of these puts of `client`, which end now, are to be recognized by; 0: nothing."""
        for seq, checksum in zip(seqs, checksums, strict=True):
            put = self.by_seq.get(seq)
            if put is not None and put.client is client:
                put.obj = with_checksum(put.obj, checksum)

    def still_eager(self, put: Put, now: float) -> bool:
        """Whether `put`, an eager one, is open and its PutEnd still waited for."""
        return self.by_seq.get(put.obj.seq) is put and now - put.started < _EAGER_S

    def remember(self, put: Put) -> None:
        """This put has ended well: doing that once more shall do nothing."""
        if len(self._ended) >= _REMEMBERED:
            self._ended_before, self._ended = self._ended, {}
        self._ended[put.obj.seq] = put.client.name

    def ended_by(self, seq: int) -> str | None:
        """The client whose put `seq` ended well a short while ago."""
        return self._ended.get(seq) or self._ended_before.get(seq)

    def oldest(self) -> Put | None:
        for put in self.by_seq.values():
            return put
        return None
