"""What running streams feel of one long prompt beside them: gaps between their tokens.

Phases: `cold`, the prompt is computed (and saved, where there is a pool); `pool`, it is loaded; `GPU hit`, it is there.
Saving is compared with `cold` of the engine without a connector, loading with `GPU hit` of the same engine.
"""

from typing import Any

from benchmarks.gpu.configurations import CONFIGURATIONS
from benchmarks.gpu.run import OutOfTime, Run
from benchmarks.gpu.services import Failed

_LIMIT = 1.15


def measure(run: Run, results: dict[str, Any]) -> None:
    """Fills `results`: by engine and phase, the gaps (ms), times to first token (ms) and cached tokens."""
    names = [name for name in run.alive() if name != "other"]
    ready: dict[str, list[list[int]]] = {}
    try:
        for name in names:
            try:
                ready[name] = _prepare(run, name)
            except Failed:
                continue
        for repeat in range(run.options.latency_repeats):
            for name, prompts in ready.items():
                if name not in run.alive():
                    continue
                rows = results.setdefault(name, {})
                try:
                    if prompts:
                        _beside(run, name, rows, "pool", prompts[repeat])
                        _beside(run, name, rows, "GPU hit", prompts[repeat])
                    _beside(run, name, rows, "cold", run.prompt(run.options.cold_length))
                    run.saved(name, run.options.cold_length)
                except Failed:
                    continue
    except OutOfTime:
        print("out of time: fewer repeats than asked for", flush=True)


def _prepare(run: Run, name: str) -> list[list[int]]:
    """Prompts that are in the pool and not on the GPU; the streams' own prompts are there too."""
    run.forget(name, pool=True)
    prompts = []
    if CONFIGURATIONS[name].transfer:
        prompts = [run.prompt(run.options.cold_length) for _ in range(run.options.latency_repeats)]
        for prompt in prompts:
            run.call(name, "ask", prompts=[prompt], tokens=1)
            run.saved(name, run.options.cold_length)
        run.forget(name)
    _beside(run, name, {}, "warm-up", run.prompt(min(run.options.lengths)))
    return prompts


def _beside(run: Run, name: str, rows: dict[str, Any], phase: str, prompt: list[int]) -> None:
    options = run.options
    found = run.call(
        name, "beside", streams=options.streams, length=options.stream_length, prompt=prompt,
        window=options.window, tail=options.window / 3,
    )  # fmt: skip
    row = rows.setdefault(phase, {"gaps": [], "first": [], "cached": []})
    row["gaps"] += [gap * 1e3 for gap in found["gaps"]]
    row["first"].append(found["first"] * 1e3)
    row["cached"].append(found["cached"])


def show(results: dict[str, Any], options: Any) -> list[str]:
    what = f"{options.streams} streams while a prompt of {options.cold_length} tokens comes"
    lines = [f"gaps between tokens of {what}, ms ({options.latency_repeats} times; TTFT of that prompt: medians)"]
    lines += [f"        {'engine':9} {'phase':8} {'p50':>7} {'p99':>8} {'most':>8} {'TTFT':>8} {'cached':>7}"]
    plain = results.get("none", {}).get("cold", {}).get("gaps", [])
    for name, rows in results.items():
        hit = rows.get("GPU hit", {}).get("gaps", [])
        for phase, row in rows.items():
            gaps, first = sorted(row["gaps"]), sorted(row["first"])
            if not gaps:
                continue
            line = f"        {name:9} {phase:8} {_share(gaps, 0.5):7.1f} {_share(gaps, 0.99):8.1f} {gaps[-1]:8.1f}"
            line += f" {_share(first, 0.5):8.1f} {min(row['cached']):7}"
            base, what = (hit, "a GPU hit") if phase == "pool" else (plain, "cold without a connector")
            if base and (phase == "pool" or (phase == "cold" and name != "none")):
                ratio = _share(gaps, 0.99) / _share(sorted(base), 0.99)
                line += f"  p99 {ratio:.2f} of {what} (limit {_LIMIT}: {'met' if ratio <= _LIMIT else 'MISSED'})"
            lines.append(line)
    return lines


def _share(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]
