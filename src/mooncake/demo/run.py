"""The course of the demo.

The reference answer comes first, from an instance that knows of no pool; it starts beside A and is gone before
anything is measured.  Then A is asked (cold: it computes the whole prompt and saves its blocks), B starts and is asked
the same (warm).  Never more than two instances at a time.
"""

from mooncake.cli.engine_settings import pool_environment, transfer_config
from mooncake.cli.loopback import fetch, free_ports, metric
from mooncake.demo import model
from mooncake.demo.ask import Answer, tokens_from_pool
from mooncake.demo.outcome import Outcome
from mooncake.demo.report import Figures
from mooncake.demo.servers import BLOCK_SIZE, Instance, Master, wait_ready
from mooncake.demo.stage import Stage, keys_in


class Demo:
    """One run."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    def run(self) -> Outcome:
        stage = self._stage
        stage.make_model()
        master = stage.start_master()
        with stage.step("starting vLLM instance A, and a reference instance without a pool"):
            reference = stage.start("reference", "", {})
            a = self._start("instance A")
            wait_ready(stage.children, reference, a)
        stage.warm_up(reference)
        alone = stage.question(reference, "asking the reference instance")
        with stage.step("stopping the reference instance"):
            stage.children.stop(reference.child)
        stage.warm_up(a)
        cold = stage.question(a, "asking instance A (cold)")
        stage.wait_saved(master, "waiting until A's blocks are in the pool")
        with stage.step("starting vLLM instance B"):
            b = self._start("instance B")
            wait_ready(stage.children, b)
        stage.warm_up(b)
        loaded_before = tokens_from_pool(b)
        warm = stage.question(b, "asking instance B (warm)")
        figures = _figures(master, alone, cold, warm, tokens_from_pool(b) - loaded_before)
        return Outcome(figures, master, "Ask instance A, then B", (a, b))

    def _start(self, name: str) -> Instance:
        transfer = transfer_config(lookup_port=free_ports(1)[0])
        return self._stage.start(name, transfer, pool_environment(self._stage.pool_config))


def _figures(master: Master, alone: Answer, cold: Answer, warm: Answer, pool_tokens: int) -> Figures:
    metrics = fetch(master.metrics_port, "/metrics") or ""
    return Figures(
        model=model.MODEL_NAME,
        ttft_cold_s=round(cold.first_token_s, 4),
        ttft_warm_s=round(warm.first_token_s, 4),
        ratio=round(warm.first_token_s / cold.first_token_s, 4),
        ttft_without_pool_s=round(alone.first_token_s, 4),
        prompt_tokens=warm.prompt_tokens,
        block_size=BLOCK_SIZE,
        pool_tokens=pool_tokens,
        pool_keys=keys_in(master),
        pool_used_bytes=int(metric(metrics, "master_allocated_bytes")),
        pool_capacity_bytes=int(metric(metrics, "master_total_capacity_bytes")),
        same_answer=alone.token_ids == cold.token_ids == warm.token_ids,
        answer=warm.text,
    )
