"""What a former master knew to be dead, as its snapshot says: statements that stay true whoever is the master.

Sequence numbers never come twice, so "the records of this key up to this number are dead" does not age.  Only a floor
("whatever is away now is dead up to this number") must not touch what was not away: the segments and tiers that the
former master had mounted are excepted by their numbers.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class Floor(msgspec.Struct, array_like=True):
    """Records up to `seq` are dead, but for those of the segments and tiers `excepted`; with a `scope`, only those of
    that tenant's values up to `seq` (see tenants.names)."""

    seq: int
    excepted: set[int]
    scope: str = ""


class Former:
    """The tombstones of a snapshot.  `owners`: number of a segment or tier → head slot (of a tier: number of the value)
    → number up to which its records are dead."""

    def __init__(self) -> None:
        self.seqs: dict[str, int] = {}
        self.groups: dict[str, int] = {}
        self.owners: dict[int, dict[int, int]] = {}
        self.floors: list[Floor] = []

    def kills(self, owner: int, slot: int, key: str, group: str, seq: int, version: int) -> bool:
        """As Tombstones.kills."""
        return (
            version <= self.seqs.get(key, 0)
            or (bool(group) and version <= self.groups.get(group, 0))
            or seq <= self.owners.get(owner, {}).get(slot, 0)
            or any(
                (version if floor.scope else seq) <= floor.seq
                and owner not in floor.excepted
                and key.startswith(floor.scope)
                for floor in self.floors
            )
        )


def carry_on(floors: Iterable[Floor], mounted: set[int]) -> list[Floor]:
    """The floors that a master with these segments and tiers mounted hands on; those that say no more than another
    are left out."""
    kept: list[Floor] = []
    for floor in sorted(floors, key=lambda floor: -floor.seq):
        excepted = floor.excepted | mounted
        if floor.seq and not any(other.excepted <= excepted and other.scope in ("", floor.scope) for other in kept):
            kept.append(Floor(floor.seq, excepted, floor.scope))
    return kept
