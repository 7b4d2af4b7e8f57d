"""Loads are declined when both ways were measured and loading is clearly slower."""

from mooncake.vllm.worth import Worth


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_nothing_is_declined_before_both_were_measured():
    worth = Worth(Clock())
    assert not worth.declines(1000)
    worth.loaded(1000, 5.0)
    assert not worth.declines(1000)
    worth = Worth(Clock())
    worth.computed(1000, 0.001)
    assert not worth.declines(1000)


def test_what_is_slower_is_declined_and_what_is_not_is_made():
    worth = Worth(Clock())
    worth.computed(1000, 0.1)
    worth.loaded(1000, 0.2)
    assert worth.declines(1000)
    worth = Worth(Clock())
    worth.computed(1000, 0.1)
    worth.loaded(1000, 0.11)
    assert not worth.declines(1000), "not clearly slower"


def test_lengths_are_told_apart():
    """A load's latency counts for short ones alone; attention makes long ones dear to compute."""
    worth = Worth(Clock())
    worth.computed(500, 0.01)
    worth.loaded(500, 0.05)
    worth.computed(32_000, 1.2)
    worth.loaded(32_000, 0.1)
    assert worth.declines(500)
    assert not worth.declines(32_000)
    assert not worth.declines(4_000), "nothing was measured near it"


def test_measurements_near_a_length_are_taken_at_their_best_for_the_load():
    worth = Worth(Clock())
    worth.computed(1000, 0.1)
    worth.loaded(1900, 0.23)
    assert not worth.declines(1000), "0.12 s in proportion: its latency is not known"
    worth = Worth(Clock())
    worth.computed(600, 0.1)
    worth.loaded(1500, 0.5)
    assert not worth.declines(1500), "as if attention were all of it, computing takes 0.63 s"


def test_a_load_is_tried_now_and_then():
    clock = Clock()
    worth = Worth(clock)
    worth.computed(1000, 0.1)
    worth.loaded(1000, 1.0)
    assert [worth.declines(1000) for _ in range(32)].count(False) == 2
    clock.now += 31
    assert not worth.declines(1000), "long ago"
    for _ in range(20):
        worth.loaded(1000, 0.01)
    assert not worth.declines(1000), "it has become quick"


def test_one_slow_step_does_not_decide():
    worth = Worth(Clock())
    for _ in range(20):
        worth.loaded(1000, 0.05)
        worth.computed(1000, 0.1)
    worth.loaded(1000, 0.2)
    assert not worth.declines(1000)
