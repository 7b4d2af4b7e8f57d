"""Blocks of a request, and the ends of their keys."""

from typing import NamedTuple


class Blocks(NamedTuple):
    """Where blocks of one group are in the KV cache (`ids`), and the hashes that name their content.

    `adapter` stands before the hash in a key: "" or what tells a LoRA adapter's content apart.
    """

    group: int
    adapter: str
    hashes: list[bytes]
    ids: list[int]

    def tails(self) -> list[str]:
        """The ends of their keys; a key is a worker's head for the group and this."""
        return tails(self.adapter, self.hashes)


def tails(adapter: str, hashes: list[bytes]) -> list[str]:
    return [adapter + value.hex() for value in hashes]
