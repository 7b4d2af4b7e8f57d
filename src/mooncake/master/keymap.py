"""The map key → Object, without pauses.

A dict that outgrows its table copies all of it: 100 ms at 0.7 million keys [M].  So only the first keys live in one
dict, which is the fastest to ask for many keys at once; further ones are spread over shards whose copies are short.
"""

from __future__ import annotations

from collections.abc import Iterator

from mooncake.master.objects import Object

_FIRST = 80_000  # a dict doubles just above 87,381 entries, in 3 ms
_SHARDS = 256
_LAST = _SHARDS - 1


class KeyMap:
    """As a dict of str → Object; `find_many` and `slices` are what it exists for."""

    __slots__ = ("_count", "_first", "_get", "_shards", "version")

    def __init__(self) -> None:
        self._first: dict[str, Object] = {}
        self._get = self._first.get
        self._shards: list[dict[str, Object]] = []
        self._count = 0  # in the shards
        self.version = 0  # another one whenever a key has come or gone

    def __len__(self) -> int:
        return len(self._first) + self._count

    def get(self, key: str) -> Object | None:
        found = self._get(key)
        if found is None and self._count:
            return self._shards[hash(key) & _LAST].get(key)
        return found

    def find_many(self, keys: list[str]) -> list[Object | None]:
        found = list(map(self._get, keys))
        if self._count:
            shards = self._shards
            for i, obj in enumerate(found):
                if obj is None:
                    key = keys[i]
                    found[i] = shards[hash(key) & _LAST].get(key)
        return found

    def insert(self, obj: Object) -> None:
        """Add an object whose key is not there."""
        self.version += 1
        if len(self._first) < _FIRST:
            self._first[obj.key] = obj
            return
        if not self._shards:
            self._shards = [{} for _ in range(_SHARDS)]
        self._shards[hash(obj.key) & _LAST][obj.key] = obj
        self._count += 1

    def insert_missing(self, objects: list[Object]) -> list[int]:
        """Add those whose keys are not there; the indexes of the others."""
        self.version += 1
        there = []
        first = self._first
        if len(first) + len(objects) <= _FIRST and not self._count:
            for i, obj in enumerate(objects):
                if first.setdefault(obj.key, obj) is not obj:
                    there.append(i)
            return there
        if not self._shards:
            self._shards = [{} for _ in range(_SHARDS)]
        shards = self._shards
        for i, obj in enumerate(objects):  # looked for and added at once: what takes long is to reach the memory
            key = obj.key
            if key in first or shards[hash(key) & _LAST].setdefault(key, obj) is not obj:
                there.append(i)
        self._count += len(objects) - len(there)
        return there

    def pop(self, key: str) -> Object | None:
        self.version += 1
        found = self._first.pop(key, None)
        if found is None and self._count:
            found = self._shards[hash(key) & _LAST].pop(key, None)
            if found is not None:
                self._count -= 1
        return found

    def slices(self) -> Iterator[list[Object]]:
        """All objects, in lists short enough for one step each.  Keys may come and go between the steps;
        what was there all the time is in exactly one list."""
        yield from _chunks(self._first)
        for shard in self._shards:
            yield from _chunks(shard)


def _chunks(shard: dict[str, Object], length: int = 2_000) -> Iterator[list[Object]]:
    objects = list(shard.values())
    for at in range(0, len(objects), length):
        yield objects[at : at + length]
