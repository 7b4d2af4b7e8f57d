"""Workers of different tensor parallel sizes share a pool; see sharing.py."""

import pytest

from tests.connector.in_vllm import run

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(240)]


def test_what_ranks_of_one_size_save_those_of_others_load(python, model):
    assert run(python, "sharing", model, limit=220).count(": shared") == 3
