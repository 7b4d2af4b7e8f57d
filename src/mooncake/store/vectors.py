"""The addresses that callers give, as the client's vectors of pieces."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mooncake.client.client import StoreClient
    from mooncake.client.put import PiecesOf, Trust


def trust_of(client: "StoreClient", checked: bool, write: bool) -> "Trust":
    if checked:
        return lambda _: True
    return lambda pieces: client.registered.covers(pieces, write)


def pieces_by_value(addresses: Sequence[Sequence[int]], sizes: Sequence[Sequence[int]]) -> "PiecesOf":
    from mooncake.transfer.pieces import flatten

    def pieces_of(values: Sequence[int]) -> Any:
        if len(values) == len(addresses):
            return flatten(addresses, sizes)
        return flatten([addresses[i] for i in values], [sizes[i] for i in values])

    return pieces_of
