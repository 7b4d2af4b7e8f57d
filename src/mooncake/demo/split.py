"""The course of the demo with separate prefill and decode instances.

All of them share one pool (MultiConnector: straight from prefill to decode, and through the pool) and stand behind one
proxy.  One decode instance is asked first, by itself and under a salt, so that nobody else can use what it computes:
that answer is the reference.  The same question then goes through the proxy twice.  In between every instance forgets
its own blocks: the second time prefill finds the prompt in the pool.
"""

import time
from collections.abc import Sequence

from mooncake.cli.children import own_command
from mooncake.cli.engine_settings import (
    CONSUMER,
    PRODUCER,
    p2p_and_pool_config,
    p2p_environment,
    pool_environment,
)
from mooncake.cli.loopback import HOST, fetch, free_ports, metric
from mooncake.demo import model
from mooncake.demo.ask import Answer
from mooncake.demo.outcome import Outcome
from mooncake.demo.servers import Instance, wait_ready
from mooncake.demo.split_report import Part, SplitFigures
from mooncake.demo.stage import Stage

_PROXY_LIMIT = 30.0  # seconds until it and everything behind it is available
_METRICS_LIMIT = 5.0  # seconds until an instance has counted what it did


class SplitDemo:
    """One run with so many instances of each role."""

    def __init__(self, stage: Stage, prefill: int, decode: int) -> None:
        self._stage = stage
        self._counts = prefill, decode
        self._instances: list[Instance] = []

    def run(self) -> Outcome:
        stage = self._stage
        stage.make_model()
        master = stage.start_master()
        prefill, decode = self._counts
        with stage.step(f"starting {prefill} prefill and {decode} decode instances of vLLM"):
            bootstrap_ports = free_ports(prefill)
            producers = [self._start(f"prefill {n + 1}", PRODUCER, port) for n, port in enumerate(bootstrap_ports)]
            consumers = [self._start(f"decode {n + 1}", CONSUMER, None) for n in range(decode)]
            self._instances = [*producers, *consumers]
            wait_ready(stage.children, *self._instances)
        with stage.step("starting the proxy"):
            proxy = self._start_proxy(producers, bootstrap_ports, consumers)
        for turn in range(max(self._counts)):  # the proxy takes turns: each instance gets one
            stage.warm_up(proxy, turn)
        alone = stage.question(consumers[0], f"asking {consumers[0].name} by itself", cache_salt="alone")
        first, first_parts = self._ask(proxy, "first", "asking the proxy")
        stage.wait_saved(master, "waiting until prefill's blocks are in the pool")
        with stage.step("letting every instance forget its own blocks"):
            for instance in self._instances:
                fetch(instance.port, "/reset_prefix_cache", method="POST")
        again, again_parts = self._ask(proxy, "again", "asking the proxy again")
        figures = SplitFigures(
            model=model.MODEL_NAME,
            prefill_instances=prefill,
            decode_instances=decode,
            prompt_tokens=first.prompt_tokens,
            ttft_alone_s=round(alone.first_token_s, 4),
            ttft_first_s=round(first.first_token_s, 4),
            ttft_again_s=round(again.first_token_s, 4),
            same_answer=alone.token_ids == first.token_ids == again.token_ids,
            answer=first.text,
            parts=(*first_parts, *again_parts),
        )
        return Outcome(figures, master, "Ask the proxy", (proxy,))

    def _start(self, name: str, role: str, bootstrap_port: int | None) -> Instance:
        transfer = p2p_and_pool_config(role, lookup_port=free_ports(1)[0])
        environment = {
            **pool_environment(self._stage.pool_config),
            **p2p_environment(bootstrap_port),
            "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
        }
        return self._stage.start(name, transfer, environment)

    def _start_proxy(
        self, producers: Sequence[Instance], bootstrap_ports: Sequence[int], consumers: Sequence[Instance]
    ) -> Instance:
        (port,) = free_ports(1)
        command = own_command("mooncake.cli.proxy", f"--host={HOST}", f"--port={port}")
        for instance, bootstrap in zip(producers, bootstrap_ports, strict=True):
            command += ["--prefill", f"http://{HOST}:{instance.port}", str(bootstrap)]
        for instance in consumers:
            command += ["--decode", f"http://{HOST}:{instance.port}"]
        children = self._stage.children
        child = children.start("the proxy", command, self._stage.folder / "proxy.log")
        wanted = f'"prefill_instances":{len(producers)},"decode_instances":{len(consumers)}'
        children.wait_ready(child, lambda: wanted in (fetch(port, "/health") or ""), _PROXY_LIMIT)
        return Instance("the proxy", child, port)

    def _ask(self, proxy: Instance, question: str, text: str) -> tuple[Answer, list[Part]]:
        """The answer, and what each instance that took part did for it."""
        before = [_counted(instance) for instance in self._instances]
        answer = self._stage.question(proxy, text)
        deadline = time.monotonic() + _METRICS_LIMIT
        while True:
            after = [_counted(instance) for instance in self._instances]
            made = sum(new[3] - old[3] for new, old in zip(after, before, strict=True))
            if made > len(answer.token_ids) or time.monotonic() > deadline:  # decode's, and prefill's one
                break
            time.sleep(0.1)
        parts = []
        for instance, old, new in zip(self._instances, before, after, strict=True):
            did = [late - early for late, early in zip(new, old, strict=True)]
            if any(did):
                parts.append(Part(question, instance.name, *did))
        return answer, parts


def _counted(instance: Instance) -> tuple[int, int, int, int]:
    """Prompt tokens computed, from the pool, and from prefill; tokens made."""
    text = fetch(instance.port, "/metrics") or ""
    cached = "vllm:prompt_tokens_cached_by_source_total"
    return (
        int(metric(text, "vllm:prompt_tokens_by_source_total", source="local_compute")),
        int(metric(text, cached, source="external_unspecified")),
        int(metric(text, cached, source="p2p")),
        int(metric(text, "vllm:generation_tokens_total")),
    )
