"""This package's own MooncakeStoreConnector in real vLLM instances of models of other kinds: with windows of attention,
with one latent head, with states, with values of 8 bits."""

import json
import subprocess
from pathlib import Path

import pytest

from mooncake.cli.engine_settings import own_store_config, pool_environment
from mooncake.store import MooncakeDistributedStore
from tests.e2e.conftest import HERE, starting
from tests.e2e.servers import BLOCK
from tests.e2e.test_vllm_store import prompt, wait_saved

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(300)]

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
# The model of tiny_model.py, keys of 20 blocks of a prompt (states are saved where a part of it ends), and arguments.
# "latent": on CPUs without AMX vLLM cannot compute behind what was loaded.
KINDS = {
    "hybrid": ("hybrid", 40, ()),
    "hybrid, speculating": ("hybrid", 40, ("--speculative-config", json.dumps(NGRAM))),
    "window": ("window", 20, ()),
    "latent": ("latent", 20, ("--dtype", "bfloat16")),
    "states": ("states", 21, ("--mamba-cache-mode", "align")),
    "fp8": ("llama", 20, ("--kv-cache-dtype", "fp8")),
}
HAS_AMX = "amx_tile" in Path("/proc/cpuinfo").read_text()


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def start_kind(zygote, python, kind, tmp_path):
    model = tmp_path / "model"
    subprocess.run([python, HERE / "tiny_model.py", model, KINDS[kind][0]], check=True)

    def settings_of(role, pool):
        transfer = own_store_config(role, lookup_budget_ms=2000) if role != "plain" else ""
        return transfer, {**pool_environment(pool.config), "VLLM_LOGGING_LEVEL": "DEBUG"}, *KINDS[kind][2]

    with starting(zygote, model, tmp_path, settings_of) as start:
        yield start


def test_what_one_computes_another_loads(pool, kind, start_kind):
    a, b, plain = start_kind(pool, a="kv_both", b="kv_both", plain="plain")
    keys = KINDS[kind][1]
    first, second = prompt(1, 20), prompt(2, 20)
    alone = [plain.ask(ids).token_ids for ids in (first, second)]
    assert alone[0] != alone[1]

    cold = a.ask(first)
    assert (cold.token_ids, cold.from_pool) == (alone[0], 0)
    wait_saved(pool, keys)
    warm = b.ask(first)
    assert (warm.token_ids, warm.from_pool) == (alone[0], 20 * BLOCK if kind != "latent" or HAS_AMX else 0)

    # A block of each group is gone, in the middle and at the end: what is whole is loaded, the rest is computed.
    a.ask(second)
    wait_saved(pool, 2 * keys)
    store = MooncakeDistributedStore()
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 1 << 20, "tcp", "", pool.address) == 0
    saved = pool.get("/get_all_keys").split()
    assert store.batch_remove(saved[::3], True) == [0] * len(saved[::3])
    store.close()
    again = b.ask(second)
    assert again.token_ids == alone[1]
    assert again.from_pool < 20 * BLOCK
