"""Real vLLM on one GPU: what a pool costs and gains, beside no connector, vLLM's own offloading, and others.

    python -m benchmarks.gpu --model FOLDER [--configurations none,offload,ours,other] [--parts hits,cold]

One process an engine, all resident at once so that they are measured in turn (`--alone`: one after the other).  Parts:
`hits` (time to first token: computed, GPU hit, pool hit), `together` (several prompts at once), `cold` (what saving
costs) and `latency` (the streams that run meanwhile).  Figures go to results.json, logs beside it.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.gpu import cold, hits, latency
from benchmarks.gpu.configurations import CONFIGURATIONS
from benchmarks.gpu.run import Run
from benchmarks.gpu.services import Clock, Failed, Services

PARTS = ("hits", "together", "cold", "latency")
_PINNED_BYTES = {"cuda": 1 << 30, "cpu": 64 << 20}


def _names(allowed: Any) -> Any:
    def parse(text: str) -> list[str]:
        names = text.split(",")
        for name in names:
            if name not in allowed:
                raise argparse.ArgumentTypeError(f"expected some of {', '.join(allowed)}, but found {name!r}")
        return names

    return parse


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def parser() -> argparse.ArgumentParser:
    configurations = "\n".join(f"  {each.name:8} {each.what}" for each in CONFIGURATIONS.values())
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        epilog=f"configurations:\n{configurations}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("--model", required=True, help="a folder; without weights in it, --load-format dummy")
    add("--configurations", type=_names(CONFIGURATIONS), default=["none", "offload", "ours", "other"],
        help="which engines (default none,offload,ours,other); about 30 GiB of the GPU each")  # fmt: skip
    add("--parts", type=_names(PARTS), default=list(PARTS), help=f"default {','.join(PARTS)}")
    add("--alone", action="store_true", help="one engine at a time; for the parts hits and together")
    add("--lengths", type=_numbers, default=[2048, 8192, 32768], help="tokens of prompts (default 2048,8192,32768)")
    add("--repeats", type=int, default=3, help="of each length (default 3)")
    add("--together", type=int, default=8, help="prompts at once (default 8)")
    add("--together-length", type=int, default=8192, help="tokens of each of them (default 8192)")
    add("--cold-length", type=int, default=32768, help="tokens of prompts in cold and latency (default 32768)")
    add("--cold-repeats", type=int, default=7, help="rounds of cold (default 7)")
    add("--latency-repeats", type=int, default=3, help="rounds of latency (default 3)")
    add("--streams", type=int, default=64, help="that run in latency (default 64)")
    add("--stream-length", type=int, default=256, help="tokens of their prompts (default 256)")
    add("--window", type=float, default=1.0, help="seconds that latency looks at, at least (default 1)")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add(
        "--load-format",
        default="seeded",
        help="vLLM's (default seeded: a plugin's random weights that tell prompts apart)",
    )
    add(
        "--compiled",
        action="store_true",
        help="with torch.compile and CUDA graphs (default: eager, which starts sooner)",
    )
    add("--kv-gib", type=float, default=12, help="KV cache of each engine on the GPU (default 12)")
    add("--pool-gib", type=float, default=16, help="memory of each pool (default 16)")
    add("--batched-tokens", type=int, default=8192, help="max_num_batched_tokens (default 8192)")
    add("--settle", type=float, default=0.02, help="seconds that saves get per 1,024 tokens (default 0.02)")
    add("--extra", type=json.loads, default={}, help='settings by configuration: {"ours": {"lookup_budget_ms": 20}}')
    add("--peer", type=Path, default=os.environ.get("MOONCAKE_PEER"), help="the folder with the peer's package")
    add("--python", default=sys.executable, help="the interpreter with vLLM (default: this one)")
    add("--trace", action="store_true", help="our connector's DEBUG lines go to its log: one a request and load")
    add("--limit", type=float, default=390, help="seconds for all of it (default 390)")
    add("--out", type=Path, help="folder for results.json and logs (default $OUT, or a new one)")
    return made


def main() -> None:
    options = parser().parse_args()
    folder = options.out or Path(os.environ.get("OUT") or tempfile.mkdtemp(prefix="gpu-bench-"))
    folder.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that everything that was started is ended
    clock = Clock(options.limit)
    results: dict[str, Any] = {"arguments": sys.argv[1:], "failures": {}}
    with tempfile.TemporaryDirectory(prefix="gpu-bench-") as work:
        groups = [[name] for name in options.configurations] if options.alone else [options.configurations]
        with Services(folder, Path(work), options) as services:
            run = Run(options, services, clock)
            for group in groups:
                run.start(group)
                _measure(run, results, folder)
                run.stop(group)
    print(f"results and logs: {folder}", flush=True)
    if results["failures"]:
        sys.exit(1)


def _measure(run: Run, results: dict[str, Any], folder: Path) -> None:
    """All parts with the engines that live; results are written after each."""
    options = run.options
    if run.alive() and "pinned" not in results:
        try:
            results["pinned"] = run.call(run.alive()[0], "pinned", size=_PINNED_BYTES[options.device])
        except Failed:
            pass
    rate = results.get("pinned", {}).get("in", 0.0)
    for part in options.parts:
        found = results.setdefault(part, {})
        if part == "hits" and rate:
            hits.measure(run, found)
            lines = hits.show(found, options, rate)
        elif part == "together":
            hits.measure_together(run, found)
            lines = hits.show_together(found, options)
        elif part == "cold":
            cold.measure(run, found)
            lines = cold.show(found, options)
        elif part == "latency":
            latency.measure(run, found)
            lines = latency.show(found, options)
        else:
            lines = []
        results["failures"] = run.failures
        (folder / "results.json").write_text(json.dumps(results, indent=1))
        print(*lines, sep="\n", end=f"\n({run.clock.left:.0f} s left)\n\n", flush=True)


if __name__ == "__main__":
    main()
