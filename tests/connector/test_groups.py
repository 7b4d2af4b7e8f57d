"""What a request needs of each group of layers, and where it goes on when some of that did not come."""

from types import SimpleNamespace as Names

import pytest

from mooncake.rpc.messages import Need
from mooncake.vllm.groups import Group, Groups
from mooncake.vllm.loading import first_lost, plan_load, whole_until

FULL, WINDOW, STATES = Group(0, 16, 0, False), Group(1, 16, 39, False), Group(2, 16, 1, True)


def request(tokens: int, size: int = 16) -> Names:
    return Names(block_hashes=[bytes([i]) * 4 for i in range(tokens // size)])


def table(*ids: int) -> list[Names]:
    return [Names(is_null=not block) for block in ids]


def test_what_is_needed_at_a_place():
    assert [FULL.first_needed(tokens) for tokens in (0, 16, 160)] == [0, 0, 0]
    # A window of 40 tokens: the next token sees the 39 before it.
    assert [WINDOW.first_needed(tokens) for tokens in (16, 39, 48, 64, 160)] == [0, 0, 0, 1, 7]
    assert [STATES.first_needed(tokens) for tokens in (0, 16, 160)] == [0, 0, 9]


def test_what_the_master_is_asked():
    groups = Groups([FULL, WINDOW, STATES, WINDOW._replace(number=3)], 16, 16, 0)
    heads = [["a0/", "a1/"], ["b0/"], ["c0/"], ["d0/"]]
    assert groups.needs(heads) == [Need(["a0/", "a1/"]), Need(["b0/", "d0/"], last=3), Need(["c0/"], last=1)]
    # Blocks of 64 and 16 tokens, hashes of 8; the last unit of a prompt is not loaded.
    groups = Groups([Group(0, 64, 0, False), WINDOW], 64, 8, 1)
    assert groups.grain == 16
    assert groups.needs([["a/"], ["b/"]]) == [Need(["a/"], every=4), Need(["b/"], every=1, last=3, skip=4)]
    assert groups.needs([["a/"], []]) == [Need(["a/"], every=4)]  # a rank of pipelines without layers of it


def test_hashes_name_all_tokens_up_to_a_blocks_end():
    groups = Groups([Group(0, 64, 0, False), WINDOW], 64, 8, 0)
    some = request(256, 8)
    assert groups.hashed(some) == 256
    assert [value[0] for value in groups.hashes(some, 64, 256, 64)] == [15, 23, 31]
    grains = groups.hashes(some, 64, 256, 16)
    assert [value[0] for value in grains[groups.grains_of(WINDOW, 64, range(6, 9))]] == [13, 15, 17]
    assert [value[0] for value in grains[groups.grains_of(groups.all[0], 64, range(2, 4))]] == [23, 31]


def test_only_blocks_that_some_place_needs_are_saved():
    groups = Groups([Group(0, 128, 0, False), WINDOW], 128, 16, 0)
    assert groups.useful(groups.all[0], range(3)) == range(3)
    assert groups.useful(WINDOW, range(4, 18)) == [5, 6, 7, 13, 14, 15]
    assert Groups([FULL, WINDOW], 16, 16, 0).useful(WINDOW, range(4)) == range(4)


def load(start: int, end: int, *tables: list[int]):
    groups = Groups([FULL, WINDOW, STATES][: len(tables)], 16, 16, 0)
    hashes = groups.hashes(request(end), start, end, 16)
    return groups, plan_load(groups, start, end, hashes, "", tables, [table(*ids) for ids in tables])


def test_a_load_brings_only_what_is_needed():
    _, plan = load(32, 96, [1, 2, 3, 4, 5, 6], [0, 0, 0, 7, 8, 9], [0, 0, 0, 0, 0, 11])
    assert [blocks.ids for blocks in plan.blocks] == [[3, 4, 5, 6], [7, 8, 9], [11]]
    assert [[value[0] for value in blocks.hashes] for blocks in plan.blocks] == [[2, 3, 4, 5], [3, 4, 5], [5]]
    assert [value[0] for value in plan.units] == [2, 3, 4, 5]


@pytest.mark.parametrize(
    ("missing", "whole", "lost"),
    [
        ({3}, None, 80),  # the last block of full attention: a shorter prefix needs a block that left the window
        ({4}, None, 48),
        ({0}, None, 32),
    ],
)
def test_a_window_that_was_not_kept_means_a_new_start(missing, whole, lost):
    groups, plan = load(32, 96, [1, 2, 3, 4, 5, 6], [0, 0, 0, 7, 8, 9])
    assert whole_until(groups, plan, missing) == whole
    assert first_lost(groups, plan, missing) == lost


def test_without_a_window_the_longest_prefix_is_kept():
    groups, plan = load(32, 96, [1, 2, 3, 4, 5, 6])
    assert [whole_until(groups, plan, {i}) for i in range(4)] == [32, 48, 64, 80]
    assert whole_until(*load(0, 96, [1, 2, 3, 4, 5, 6]), {0}) is None


def test_a_prompt_within_the_window_is_kept_as_far_as_it_came():
    groups, plan = load(0, 48, [1, 2, 3], [4, 5, 6])
    assert whole_until(groups, plan, {2}) == 32
    assert whole_until(groups, plan, {2, 4}) == 16
    assert first_lost(groups, plan, {2, 4}) == 16


def test_a_state_is_of_its_place_only():
    groups, plan = load(0, 48, [1, 2, 3], [4, 5, 6], [0, 0, 7])
    assert whole_until(groups, plan, {1}) is None
    assert whole_until(groups, plan, {6}) is None
