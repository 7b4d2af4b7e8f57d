"""Prefill and decode instances of different tensor-parallel sizes.

Not run unless MOONCAKE_TEST_TP is set: vLLM's ranks on CPUs wait for each other by spinning, so where there are fewer
idle cores than ranks one answer takes minutes.
"""

import os

import pytest

from tests.e2e.deployment import Deployment, from_peer
from tests.e2e.questions import TOKENS, completion, ids_of, prompt
from tests.processes import wait_until
from tests.proxy.processes import streamed

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not os.environ.get("MOONCAKE_TEST_TP"), reason="set MOONCAKE_TEST_TP=1 where cores are idle"),
]


@pytest.mark.parametrize(("prefill_ranks", "decode_ranks"), [(2, 1), (1, 2), (2, 2)])
def test_ranks_of_different_numbers(zygote, model, tmp_path, cleanup, prefill_ranks, decode_ranks):
    deployment = Deployment(cleanup, zygote, model, tmp_path)
    alone = deployment.plain()
    alone.wait_ready()
    prompts = [prompt(seed) for seed in (1, 2)]
    expected = [alone.ask(ids, TOKENS).token_ids for ids in prompts]
    alone.stop()

    deployment.start(1, 1, "--health-timeout=60", ranks=(prefill_ranks, decode_ranks))
    for ids, tokens in zip(prompts, expected, strict=True):
        assert ids_of(streamed(deployment.proxy.url, completion(ids))) == tokens
    (decode,) = deployment.decode
    wait_until(lambda: from_peer(decode) == sum(map(len, prompts)), what="decode's metrics")
