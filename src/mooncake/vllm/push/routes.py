"""The way from our blocks to a peer's: which of our layers it wants, and the runs of bytes of one block.

Made once for each peer; `pieces` then are two outer sums of arrays.
"""

from typing import NamedTuple

import numpy as np

from mooncake.errors import ConfigError
from mooncake.transfer.pieces import Int64Array, Pieces
from mooncake.vllm.push.geometry import Layers, Shape, runs, split
from mooncake.vllm.push.heads import Heads, heads_of, sources


class Ranks(NamedTuple):
    """A worker's place: tensor and pipeline parallel."""

    tensor: int
    tensor_size: int
    pipeline: int
    pipeline_size: int


class _Runs(NamedTuple):
    """Of one block of a layer, as offsets from its start on both sides."""

    ours: Int64Array
    theirs: Int64Array
    lengths: Int64Array


class Route:
    """From our layers to those of a peer.  `layers`: the indexes of ours that it has too."""

    def __init__(self, ours: Layers, theirs: Layers, heads: tuple[Heads, Heads] | None) -> None:
        """`heads`: which of a block of ours go to which of a block of theirs; None: all.  Raises ConfigError with a
        sentence where bytes of the two cannot be exchanged."""
        places = {name: i for i, name in enumerate(theirs.names)}
        self.layers = np.array([i for i, name in enumerate(ours.names) if name in places], np.int64)
        index = np.array([places[ours.names[i]] for i in self.layers], np.int64)
        self._bases, self._strides = np.array(ours.bases, np.int64), np.array(ours.strides, np.int64)
        self._their_bases, self._their_strides = np.zeros_like(self._bases), np.zeros_like(self._strides)
        self._their_bases[self.layers] = np.array(theirs.bases, np.int64)[index]
        self._their_strides[self.layers] = np.array(theirs.strides, np.int64)[index]
        self._runs: list[_Runs] = []
        self._kinds = np.zeros(len(ours.names), np.int64)  # of each layer, which of these
        known: dict[tuple[int, int], int] = {}
        for i, there in zip(self.layers.tolist(), index.tolist(), strict=True):
            pair = ours.kinds[i], theirs.kinds[there]
            if pair not in known:
                known[pair] = len(self._runs)
                try:
                    self._runs.append(_runs_of(ours.shapes[pair[0]], theirs.shapes[pair[1]], heads))
                except ValueError as error:
                    raise ConfigError(f"layer {ours.names[i]}: {error}") from None
            self._kinds[i] = known[pair]
        self.block_bytes = np.zeros(len(ours.names), np.int64)  # of each layer, what goes to the peer
        for i in self.layers.tolist():
            self.block_bytes[i] = self._runs[self._kinds[i]].lengths.sum()

    def pieces(self, layers: Int64Array, ours: Int64Array, theirs: Int64Array) -> tuple[Pieces, Pieces]:
        """(here, there) for blocks `ours` to go to blocks `theirs`, of some of our layers."""
        near: list[Int64Array] = []
        far: list[Int64Array] = []
        lengths: list[Int64Array] = []
        for kind, one in enumerate(self._runs):
            which = layers[self._kinds[layers] == kind]
            if not len(which):
                continue
            near.append(_sum(self._bases[which], self._strides[which], ours, one.ours))
            far.append(_sum(self._their_bases[which], self._their_strides[which], theirs, one.theirs))
            lengths.append(np.tile(one.lengths, len(which) * len(ours)))
        sizes = np.concatenate(lengths)
        return Pieces(np.concatenate(near), sizes), Pieces(np.concatenate(far), sizes)


def make_route(ours: Layers, we: Ranks, theirs: Layers, peer: Ranks, heads: int) -> Route | None:
    """From worker `we` of prefill to worker `peer` of decode; None if nothing goes this way.  `heads`: of the whole
    model.  Raises ConfigError with a sentence."""
    if peer.tensor_size == we.tensor_size:
        return Route(ours, theirs, None) if peer.tensor == we.tensor else None
    for size in (we.tensor_size, peer.tensor_size):
        if max(size, heads) % min(size, heads):
            raise ConfigError(f"{heads} KV heads cannot be shared out evenly between {size} ranks")
    mine = sources(peer.tensor, peer.tensor_size, we.tensor_size, heads).get(we.tensor)
    if mine is None:
        return None
    here = heads_of(we.tensor, we.tensor_size, heads)
    there = heads_of(peer.tensor, peer.tensor_size, heads)
    for side, whole in ((ours, here), (theirs, there)):
        for shape in side.shapes:
            if shape.heads[0] != whole.size:
                raise ConfigError(
                    f"a layer has {shape.heads[0]} KV heads where {whole.size} were expected; prefill and decode of "
                    "this model need the same tensor parallel size"
                )
    return Route(ours, theirs, (mine.of(here), mine.of(there)))


def _runs_of(ours: Shape, theirs: Shape, heads: tuple[Heads, Heads] | None) -> _Runs:
    """Raises ValueError."""
    if heads is None:
        heads = Heads(0, ours.heads[0]), Heads(0, theirs.heads[0])
    mine = (ours.dtype, ours.block_tokens, ours.bytes_of_token, heads[0].size)
    peers = (theirs.dtype, theirs.block_tokens, theirs.bytes_of_token, heads[1].size)
    if mine != peers:
        raise ValueError(
            f"prefill's blocks are (type, tokens, bytes of a token and head, heads) {mine}, decode's are {peers}; they "
            "must be the same"
        )
    unit = int(np.gcd(ours.unit, theirs.unit))
    near = split(ours.offsets(heads[0]), ours.unit, unit)
    far = split(theirs.offsets(heads[1]), theirs.unit, unit)
    return _Runs(*runs(near, far, unit))


def _sum(bases: Int64Array, strides: Int64Array, blocks: Int64Array, offsets: Int64Array) -> Int64Array:
    """Addresses by layer, then block, then run."""
    return (bases[:, None, None] + strides[:, None, None] * blocks[None, :, None] + offsets[None, None, :]).ravel()
