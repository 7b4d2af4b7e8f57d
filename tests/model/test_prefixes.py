"""How far lists of keys are there for several groups of layers, against the definition tried at every place."""

from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake.master.prefixes import places
from mooncake.rpc.messages import Need, Prefix
from tests.unit.test_master_directory import World

STEP = 4


@st.composite
def needs(draw) -> list[Need]:
    found = []
    for group in range(draw(st.integers(1, 3))):
        every = draw(st.sampled_from((1, 2, 4)))
        last = draw(st.integers(0, 6))
        skip = STEP // every * draw(st.integers(0, 1)) if last else 0
        heads = [f"g{group}r{rank}/" for rank in range(draw(st.integers(1, 2)))]
        found.append(Need(heads, every, last, skip))
    return found


def counts(place: int, need: Need, tails: list[str], there: set[str]) -> bool:
    end = max(0, place // need.every - need.skip)
    start = max(0, end - need.last) if need.last else 0
    blocks = [tails[(block + 1) * need.every - 1] for block in range(start, end)]
    return all(head + tail in there for head in need.heads for tail in blocks)


def needed(place: int, need: Need, tails: list[str]) -> list[str]:
    end = max(0, place // need.every - need.skip)
    start = max(0, end - need.last) if need.last else 0
    return [head + tails[(block + 1) * need.every - 1] for block in range(start, end) for head in need.heads]


@settings(max_examples=300, deadline=None)
@given(needs(), st.integers(0, 30), st.data())
def test_the_farthest_place_that_counts_for_all(wanted, length, data):
    tails = [f"{i:02}" for i in range(length)]
    keys = [head + tail for need in wanted for tail in tails for head in need.heads]
    gone = data.draw(st.sets(st.sampled_from(keys), max_size=6)) if keys else set()
    there = set(keys) - gone
    world = World(("h1", 1 << 20))
    assert world.put(sorted(there), 64) == [0] * len(there)
    expected = max(
        place for place in range(0, length + 1, STEP) if all(counts(place, need, tails, there) for need in wanted)
    )
    steps = places(world.directory, Prefix(wanted, [tails], STEP))
    while True:
        try:
            next(steps)
        except StopIteration as end:
            assert end.value.lengths == [expected]
            break
    leased = {key for need in wanted for key in needed(expected, need, tails)}
    removed = world.directory.remove(sorted(there), False, world.now)
    assert {key for key, code in zip(sorted(there), removed, strict=True) if code} == leased
