"""Patterns from clients: none holds up the master for long."""

import time

import pytest

from mooncake.errors import ErrorCode, StoreError
from mooncake.master.patterns import LONGEST, searcher


@pytest.mark.parametrize("piece", ["[a-z]{1,900}", r"\pL{900}", r"(\pL{100}){9}", "(?:a?){500}", "((a{9}){9}){9}"])
def test_what_would_take_seconds_to_make_is_refused(piece):
    began = time.process_time()
    with pytest.raises(StoreError) as refused:
        searcher(piece * (LONGEST // len(piece)))
    assert refused.value.code == ErrorCode.INVALID_PARAMS
    assert time.process_time() - began < 1


@pytest.mark.parametrize("pattern", ["a" * (LONGEST + 1), "(", "(?=x)", "*"])
def test_what_is_none(pattern):
    with pytest.raises(StoreError):
        searcher(pattern)


def test_usual_ones():
    assert searcher("^model-[0-9]{1,4}/")("model-17/block")
    assert not searcher("^model$")("a model")
    assert searcher("x" * LONGEST)("y" + "x" * LONGEST)
