"""How soon a prompt's KV cache is with decode once prefill has computed its last layer: two processes on one GPU.

    python -m benchmarks.gpu.push [--tokens 32768] [--repeats 7] [--device cuda] [--json FILE]

Needs one NVIDIA GPU, torch and 16 GiB of its memory; no vLLM: the workers' halves of `mooncake.vllm.MooncakeConnector`
are driven as its engine drives them.  Shapes of Llama-3.1-8B: 32 layers, 8 KV heads of 128, bf16, blocks of 16 tokens.
"Prefill" computes chunks of 8192 tokens layer by layer: products of matrices that take --layer-ms a layer, then the
layer's KV into its blocks, then the hook.  `streamed`: decode has asked before; `late`: it asks when all is computed;
`one push a step`: no hooks run, as in whole CUDA graphs.  Each beside a device copy of the same bytes in the same run.
`beside`: how much longer the computing takes while it is pushed, against the same without a transfer, in turn.  Every
block is compared.  Figures are medians; times are from the end of the last layer's work on the GPU to decode's
`finished_recving`.  --device cpu tries the script where there is no GPU (shorten --tokens and --layers).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

from mooncake.cli.loopback import free_ports
from mooncake.vllm.push.items import Handed, Pull, Share
from mooncake.vllm.push.routes import Ranks
from mooncake.vllm.push.settings import PushSettings
from mooncake.vllm.push.site import Site
from mooncake.vllm.push.worker import Worker

HEADS, WIDTH, BLOCK, CHUNK = 8, 128, 16, 8192
BAR_MS = 20.0  # for 32k tokens
LIMIT = 60


class Counted:
    """Takes counts, and keeps the copies' own time and size."""

    def __init__(self) -> None:
        self.transfers: list[tuple[float, int, int]] = []

    def sent(self, seconds: float, size: int, pieces: int) -> None:
        self.transfers.append((seconds, size, pieces))

    def failed_to_send(self) -> None:
        print("a push failed", file=sys.stderr)

    def failed_to_receive(self) -> None:
        print("a prompt did not come", file=sys.stderr)

    def expired(self) -> None:
        pass


class Side:
    """One worker and its KV cache, [blocks, 2, tokens, heads, width] a layer."""

    def __init__(self, options: argparse.Namespace, engine: str, port: int, *, hands: bool) -> None:
        import torch

        self.counted = Counted()
        self.device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
        blocks = options.tokens // BLOCK
        self.caches = [
            torch.zeros((2 * blocks, 2, BLOCK, HEADS, WIDTH), dtype=torch.bfloat16, device=self.device)
            for _ in range(options.layers)
        ]
        settings = PushSettings(num_workers=options.workers, bootstrap_port=port, abort_limit=LIMIT)
        site = Site(engine, "127.0.0.1", Ranks(0, 1, 0, 1), 0, hands, "127.0.0.1", HEADS, 2 * blocks, BLOCK, True)
        self.worker = Worker(settings, site, self.counted, hands=hands, pulls=not hands)
        self.worker.register({f"layers.{i}": cache for i, cache in enumerate(self.caches)})
        self.ids = torch.randperm(2 * blocks, generator=torch.Generator().manual_seed(1 + hands))[:blocks].tolist()

    def synchronize(self) -> None:
        """Until the work that is queued here is done; pushes have streams of their own."""
        import torch

        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


def plan(**parts: Any) -> Any:
    nothing: dict[str, Any] = {
        "pulls": {}, "cancels": [], "begun": {}, "shares": [], "preempted": [], "finished": [], "dropped": {},
    }  # fmt: skip
    return SimpleNamespace(**{**nothing, **parts})


# ------------------------------------------------------------ decode, a process of its own


def decode(options: argparse.Namespace) -> None:
    """Commands on stdin: {"pull": transfer}, answered with when it came; {"sums": [...]}: whether blocks hold these."""
    import torch

    side = Side(options, "decode", 0, hands=False)
    print(json.dumps("ready"), flush=True)
    ids = torch.tensor(side.ids, device=side.device)
    for line in sys.stdin:
        command = json.loads(line)
        if "pull" in command:
            name = command["pull"]
            registry = f"http://127.0.0.1:{options.port}"
            pull = Pull(name, registry, "prefill", 0, side.ids, options.tokens, 0)
            side.worker.start_pulls(plan(pulls={name: pull}))
            print(json.dumps("asked"), flush=True)
            while name not in side.worker.take_received():
                time.sleep(0.0002)
            came = time.monotonic()
            print(json.dumps([came, name not in side.worker.take_failed()]), flush=True)
        else:
            sums = [int(cache.view(torch.int16)[ids].long().sum()) for cache in side.caches]
            print(json.dumps(sums == command["sums"]), flush=True)
            for cache in side.caches:
                cache.zero_()
            side.synchronize()
    side.worker.close()


# ------------------------------------------------------------ prefill, this process


class Prefill:
    def __init__(self, options: argparse.Namespace, port: int) -> None:
        import torch

        self.options = options
        self.side = Side(options, "prefill", port, hands=True)
        self.ids = torch.tensor(self.side.ids, device=self.side.device)
        size = 4096 if self.side.device.type == "cuda" else 256
        self.left = torch.randn((size, size), device=self.side.device).to(torch.bfloat16)
        self.products = self._products_of(options.layer_ms)
        self.number = 0

    def _products_of(self, milliseconds: float) -> int:
        """How many products take that long."""
        for _ in range(3):
            self.left @ self.left
        self.side.synchronize()
        began = time.perf_counter()
        for _ in range(20):
            self.left @ self.left
        self.side.synchronize()
        return max(1, round(milliseconds / ((time.perf_counter() - began) / 20 * 1e3)))

    def run(self, name: str | None, *, hooks: bool = True) -> tuple[float, float]:
        """Compute one prompt, for a transfer or for none: (when its last layer was there, seconds it took)."""
        import torch

        tokens, worker, steps = self.options.tokens, self.side.worker, self.side.worker.steps
        self.number += 1
        fresh = torch.randint(-30000, 30000, (2, BLOCK, HEADS, WIDTH), dtype=torch.int16, device=self.side.device)
        fresh[0, 0, 0, 0] = self.number
        if name is not None:
            worker.begin_step(plan(begun={name: Handed(name, tokens, 0)}))
        self.side.synchronize()
        began = time.monotonic()
        for start in range(0, tokens, CHUNK):
            first, end = start // BLOCK, min(tokens, start + CHUNK) // BLOCK
            share = Share(name or "", self.side.ids[first:end], end)
            worker.begin_step(plan(shares=[share] if name is not None else []))
            for layer, cache in enumerate(self.side.caches):
                for _ in range(self.products):
                    self.left @ self.left
                cache.view(torch.int16)[self.ids[first:end]] = fresh + layer
                if hooks:
                    steps.layer(f"layers.{layer}")
            steps.end()
        self.side.synchronize()
        ended = time.monotonic()
        if name is not None:
            worker.begin_step(plan(finished=[name]))
        return ended, ended - began

    def sums(self) -> list[int]:
        import torch

        return [int(cache.view(torch.int16)[self.ids].long().sum()) for cache in self.side.caches]

    def copy_ms(self) -> float:
        """A device copy of as many bytes."""
        import torch

        source = torch.empty(self.options.tokens * 2 * HEADS * WIDTH * self.options.layers, dtype=torch.bfloat16,
                             device=self.side.device)  # fmt: skip
        target = torch.empty_like(source)
        target.copy_(source)
        self.side.synchronize()
        began = time.perf_counter()
        target.copy_(source)
        self.side.synchronize()
        return (time.perf_counter() - began) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--layer-ms", type=float, default=9.0, help="of a chunk: 32k tokens then take 1.15 s")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--role", default="", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role == "decode":
        decode(options)
    else:
        measure(options)


def measure(options: argparse.Namespace) -> None:
    (port,) = free_ports(1)
    prefill = Prefill(options, port)
    command = [
        sys.executable, "-m", "benchmarks.gpu.push", "--role", "decode", "--port", str(port),
        "--tokens", str(options.tokens), "--layers", str(options.layers), "--device", options.device,
    ]  # fmt: skip
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ) as process:

        def hear() -> Any:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, "decode has ended"
            return json.loads(line)

        def tell(**what: Any) -> None:
            assert process.stdin is not None
            print(json.dumps(what), file=process.stdin, flush=True)

        def one(case: str, name: str) -> float:
            """Milliseconds from the last layer's end to arrival."""
            if case != "late":
                tell(pull=name)
                assert hear() == "asked"
                time.sleep(0.1)
            ended, _ = prefill.run(name, hooks=case != "one push a step")
            if case == "late":
                ended = time.monotonic()
                tell(pull=name)
                assert hear() == "asked"
            came, whole = hear()
            assert whole, "it did not come whole"
            tell(sums=prefill.sums())
            assert hear(), "decode has other bytes"
            while name not in prefill.side.worker.take_sent():
                time.sleep(0.001)
            return (came - ended) * 1e3

        assert hear() == "ready"
        results: dict[str, Any] = {"tokens": options.tokens, "size": 0}
        one("streamed", "warm")
        for case in ("streamed", "one push a step", "late"):
            prefill.side.counted.transfers.clear()
            copies, times = [], []
            for i in range(options.repeats):
                copies.append(prefill.copy_ms())
                times.append(one(case, f"{case} {i}"))
            _, size, pieces = prefill.side.counted.transfers[-1]
            row = {"ms": statistics.median(times), "worst_ms": max(times), "copy_ms": statistics.median(copies)}
            results[case] = {**row, "all": times}
            results["size"] = size
            print(
                f"{case:16} {row['ms']:8.2f} ms after the last layer (worst {row['worst_ms']:.2f}); a device copy of "
                f"these {size / 1e9:.2f} GB takes {row['copy_ms']:.2f} ms; {pieces} pieces",
                flush=True,
            )
        alone, beside = [], []
        for i in range(options.repeats):
            alone.append(prefill.run(None)[1])
            tell(pull=f"beside {i}")
            hear()
            time.sleep(0.1)
            beside.append(prefill.run(f"beside {i}")[1])
            hear()
        results["beside"] = {"alone_s": statistics.median(alone), "pushed_s": statistics.median(beside)}
        print(
            f"computing alone {results['beside']['alone_s']:.3f} s, while it is pushed "
            f"{results['beside']['pushed_s']:.3f} s: {results['beside']['pushed_s'] / results['beside']['alone_s']:.3f}"
        )
        process.stdin.close()  # type: ignore[union-attr]  # it was opened as a pipe
        process.wait(30)
    prefill.side.worker.close()
    if options.tokens == 32768 and options.device == "cuda":
        met = results["streamed"]["ms"] <= BAR_MS
        print(f"streamed: at most {BAR_MS:g} ms {'met' if met else 'NOT met'}")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
