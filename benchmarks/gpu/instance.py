"""One vLLM engine in a process of its own, told by its standard input what to do: JSON lines in, JSON lines out.

    python -m benchmarks.gpu.instance '{"model": FOLDER, ...arguments of vllm.LLM}'

Imports vLLM alone, never this project: the connector that the arguments name is found on PYTHONPATH, which may hold
another package of that name.  Requests are driven through the engine's own steps, so the time of every token is seen.
Ends when its input does.
"""

import json
import os
import random
import sys
import time
from typing import Any

WARM_TOKENS = 4  # that every stream has had before a request comes beside it
STREAMS_SEED = 1 << 32  # their prompts are the same every time


class Instance:
    def __init__(self, arguments: dict[str, Any]) -> None:
        from vllm import LLM

        self._llm = LLM(**arguments)
        self._engine = self._llm.llm_engine
        self._count = 0
        self._vocabulary = int(self._engine.vllm_config.model_config.get_vocab_size())
        self._longest = int(arguments["max_model_len"])

    # -- what it can be told; every method takes and returns what JSON can carry

    def describe(self) -> dict[str, Any]:
        cache = self._engine.vllm_config.cache_config
        return {"blocks": cache.num_gpu_blocks, "block_size": cache.block_size}

    def ask(self, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        """Answer prompts, each a [seed, tokens], at once.  Seconds to each one's first token and to the end of all."""
        begin = time.perf_counter()
        names = [self._add(*prompt, tokens) for prompt in prompts]
        first: dict[str, float] = {}
        last = {}
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                if output.outputs[0].token_ids:
                    first.setdefault(output.request_id, time.perf_counter() - begin)
                last[output.request_id] = output
        return {
            "first": [first[name] for name in names],
            "all": time.perf_counter() - begin,
            "cached": [last[name].num_cached_tokens or 0 for name in names],
            "answers": [list(last[name].outputs[0].token_ids) for name in names],
        }

    def forget(self, seconds: float, pool: bool = False) -> bool:
        """Empty vLLM's own prefix cache, and with `pool` the connector's; whether that was done within `seconds`.

        It cannot be done while blocks are still being saved, and the engine hears of a save's end in a step only.
        """
        end = time.monotonic() + seconds
        if pool:
            self._llm.reset_prefix_cache(reset_connector=True)  # some connectors cannot: their pool is bounded anyhow
        while not self._llm.reset_prefix_cache():
            if time.monotonic() > end:
                return False
            self.settle(0.05)
        return True

    def settle(self, seconds: float) -> None:
        """Let saves go on for a while, then step so that the engine hears of their ends."""
        time.sleep(seconds)
        self.ask([[random.randrange(1 << 40), 16]], 2)

    def beside(self, streams: int, length: int, prompt: list[int], window: float, tail: float) -> dict[str, Any]:
        """Running streams with prompts of `length` tokens, and a request that comes beside them.

        Gaps in seconds between the tokens of each stream, from the request's arrival until `window` seconds later and
        at least `tail` seconds after its first token; and the seconds to that token.
        """
        most = self._longest - length - 8
        running = {self._add(STREAMS_SEED + i, length, most): 0.0 for i in range(streams)}
        seen = dict.fromkeys(running, 0)
        while min(seen.values()) < WARM_TOKENS:
            for output in self._engine.step():
                seen[output.request_id] += 1
                running[output.request_id] = time.perf_counter()
        begin = time.perf_counter()
        name = self._add(*prompt, 1)
        gaps: list[float] = []
        first, cached = 0.0, 0
        while not first or time.perf_counter() < max(begin + window, begin + first + tail):
            for output in self._engine.step():
                now = time.perf_counter()
                if output.request_id == name:
                    first, cached = first or now - begin, output.num_cached_tokens or 0
                elif output.finished:
                    raise RuntimeError(f"a stream ended after {most} tokens, before the window did: take a shorter one")
                else:
                    gaps.append(now - running[output.request_id])
                    running[output.request_id] = now
        self._engine.abort_request([*running])
        while self._engine.has_unfinished_requests():
            self._engine.step()
        return {"gaps": gaps, "first": first, "cached": cached}

    def pinned(self, size: int) -> dict[str, float]:
        """GB/s of `size` bytes from pinned memory into the GPU and back (on a CPU: from memory to memory)."""
        import torch

        gpu = torch.cuda.is_available()
        host = torch.ones(size, dtype=torch.uint8, pin_memory=gpu)
        near = torch.empty(size, dtype=torch.uint8, device="cuda" if gpu else "cpu")
        rates = {}
        for name, target, source in (("in", near, host), ("out", host, near)):
            taken = []
            for _ in range(6):
                begin = time.perf_counter()
                target.copy_(source, non_blocking=True)
                if gpu:
                    torch.cuda.synchronize()
                taken.append(time.perf_counter() - begin)
            rates[name] = size / sorted(taken)[2] / 1e9
        return rates

    def close(self) -> None:
        self._engine.engine_core.shutdown()

    def _add(self, seed: int, length: int, tokens: int) -> str:
        from vllm import SamplingParams

        numbers = random.Random(seed)
        ids = [numbers.randrange(100, min(2000, self._vocabulary)) for _ in range(length)]
        self._count += 1
        name = f"r{self._count}"
        parameters = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)
        self._engine.add_request(name, {"prompt_token_ids": ids}, parameters)
        return name


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what vLLM prints goes to the log
    instance = Instance(json.loads(sys.argv[1]))
    answers.write(json.dumps(instance.describe()) + "\n")
    for line in sys.stdin:
        name, arguments = json.loads(line)
        answers.write(json.dumps(getattr(instance, name)(**arguments)) + "\n")
    instance.close()
    os._exit(0)  # what torch and vLLM still do at exit is not waited for


if __name__ == "__main__":
    main()
