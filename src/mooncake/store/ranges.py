"""get_into_ranges: fragments of values into fragments of registered buffers."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mooncake.client.fragments import Fragment, read_fragments
from mooncake.errors import ErrorCode, StoreError
from mooncake.transfer.pieces import pieces_of

if TYPE_CHECKING:
    from mooncake.client.client import StoreClient

INVALID = int(ErrorCode.INVALID_PARAMS)


def get_ranges(
    client: "StoreClient",
    buffer_ptrs: Sequence[int],
    all_keys: Sequence[Sequence[str]],
    all_dst_offsets: Sequence[Sequence[Sequence[int]]],
    all_src_offsets: Sequence[Sequence[Sequence[int]]],
    all_sizes: Sequence[Sequence[Sequence[int]]],
    results: list[list[list[int]]],
) -> list[list[list[int]]]:
    """Fill `results` (nested as `all_sizes`) with bytes or codes."""
    if not len(buffer_ptrs) == len(all_keys) == len(all_dst_offsets) == len(all_src_offsets) == len(all_sizes):
        return results
    wanted = list(dict.fromkeys(key for keys in all_keys for key in keys))
    if not wanted:
        return results
    try:
        located = client.gets.locate(wanted)
    except StoreError as error:
        return [[[int(error.code)] * len(sizes) for sizes in by_key] for by_key in all_sizes]
    found_by_key = dict(zip(wanted, located.found, strict=True))
    fragments, where = [], []
    for b, (base, keys) in enumerate(zip(buffer_ptrs, all_keys, strict=True)):
        if not len(keys) == len(all_dst_offsets[b]) == len(all_src_offsets[b]) == len(all_sizes[b]):
            continue
        for k, key in enumerate(keys):
            found = found_by_key[key]
            asked = zip(all_dst_offsets[b][k], all_src_offsets[b][k], all_sizes[b][k], strict=False)
            for f, (to, at, size) in enumerate(asked):
                if isinstance(found, int):
                    results[b][k][f] = found
                elif size > 0 and at >= 0 and to >= 0 and at + size <= found.size:
                    fragments.append(Fragment(key, found, at, base + to, size))
                    where.append((b, k, f))
    if not fragments or not client.contains(pieces_of([f.address for f in fragments], [f.size for f in fragments])):
        client.gets.finish(located)
        return results
    try:
        codes = read_fragments(client.gets, fragments, located, lambda pieces: client.covers(pieces, True))
    finally:
        client.gets.finish(located)
    for (b, k, f), code, fragment in zip(where, codes, fragments, strict=True):
        results[b][k][f] = code or fragment.size
    return results
