"""Every rank of decode gets each of its heads once, and every rank of prefill knows whom it hears from."""

import itertools

import pytest

from mooncake.vllm.push.heads import Heads, heads_of, idle_sources, receivers, sources

SIZES = (1, 2, 4, 8, 16)
CASES = [
    (heads, prefill, decode)
    for heads, prefill, decode in itertools.product((1, 2, 4, 8), SIZES, SIZES)
    if max(heads, prefill) % min(heads, prefill) == 0 and max(heads, decode) % min(heads, decode) == 0
]


@pytest.mark.parametrize(("heads", "prefill", "decode"), CASES)
def test_all_heads_come_once_from_who_has_them(heads, prefill, decode):
    for rank in range(decode):
        found = sources(rank, decode, prefill, heads)
        came = sorted(head for part in found.values() for head in range(part.first, part.end))
        wanted = heads_of(rank, decode, heads)
        assert came == list(range(wanted.first, wanted.end))
        for source, part in found.items():
            there = heads_of(source, prefill, heads)
            assert there.first <= part.first < part.end <= there.end


@pytest.mark.parametrize(("heads", "prefill", "decode"), CASES)
def test_each_rank_of_prefill_hears_from_those_it_expects(heads, prefill, decode):
    heard: dict[int, list[int]] = {source: [] for source in range(prefill)}
    for rank in range(decode):
        for source in sources(rank, decode, prefill, heads):
            heard[source].append(rank)
        for source in idle_sources(rank, decode, prefill, heads):
            heard[source].append(rank)
    for source in range(prefill):
        assert heard[source], f"rank {source} would wait for ever"
        assert sorted(heard[source]) == sorted(receivers(source, prefill, decode, heads))


@pytest.mark.parametrize(("prefill", "decode"), [(8, 2), (8, 8), (2, 16)])
def test_ranks_with_the_same_heads_share_the_work(prefill, decode):
    """One KV head, as MLA has it."""
    used = [next(iter(sources(rank, decode, prefill, 1))) for rank in range(decode)]
    assert len(set(used)) == min(prefill, decode)


def test_heads_within_a_part():
    assert Heads(5, 7).of(Heads(4, 8)) == Heads(1, 3)
