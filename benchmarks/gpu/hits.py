"""Time to first token: computed, from the GPU's own cache, from the pool; one prompt at a time, and several at once.

Every repeat asks all engines in turn.  A pool hit is bounded by the GPU hit of the same engine and the time that the
bytes take over the bus, at the rate of pinned copies in the same run.
"""

import statistics
from typing import Any

from benchmarks.gpu.configurations import CONFIGURATIONS, kv_bytes
from benchmarks.gpu.run import OutOfTime, Run
from benchmarks.gpu.services import Failed

ANSWER = 8  # tokens that are compared
_BUS, _EXTRA = 1.3, 6.0  # the limit: GPU hit + _BUS x bytes / rate + _EXTRA ms
_OTHER = 1.1  # of the own memory's: from another engine's


def measure(run: Run, results: dict[str, Any]) -> None:
    """Fills `results` as it goes: by length, by engine, lists of ms."""
    for name in run.alive():
        try:
            warm_up(run, name)
        except Failed:
            continue
    try:
        for length in run.options.lengths:
            rows: dict[str, dict[str, list[Any]]] = results.setdefault(str(length), {})
            for repeat in range(run.options.repeats):
                _one_round(run, length, rows, compare=repeat == 0)
    except OutOfTime:
        print("out of time: fewer repeats than asked for", flush=True)


def warm_up(run: Run, name: str) -> None:
    """The largest prompt twice, so that everything is compiled and allocated; a hit from the pool as well."""
    for length in sorted({min(run.options.lengths), max(run.options.lengths)}):
        prompt = run.prompt(length)
        run.call(name, "ask", prompts=[prompt], tokens=2)
        run.saved(name, length)
        if CONFIGURATIONS[name].transfer:
            run.forget(name)
        run.call(name, "ask", prompts=[prompt], tokens=2)


def _one_round(run: Run, length: int, rows: dict[str, dict[str, list[Any]]], *, compare: bool) -> None:
    saved: dict[str, tuple[list[int], list[int]]] = {}  # by engine: the prompt it has saved, its answer
    for name in run.alive():
        row = rows.setdefault(name, {})
        try:
            reads = CONFIGURATIONS[name].reads
            if reads:
                if reads in saved:
                    prompt, answer = saved[reads]
                    _pool(run, name, row, prompt, answer, compare=compare)
                    _ask(run, name, row, "hot", prompt)
                    run.forget(name)
                continue
            prompt = run.prompt(length)
            _ask(run, name, row, "cold", prompt)
            run.saved(name, length)
            _ask(run, name, row, "hot", prompt)
            if CONFIGURATIONS[name].transfer:
                answer = []
                if compare:
                    answer = run.call(name, "ask", prompts=[prompt], tokens=ANSWER)["answers"][0]
                    run.saved(name, 64)
                run.forget(name)
                saved[name] = prompt, answer
                _pool(run, name, row, prompt, answer, compare=compare)
            run.forget(name)
        except Failed:
            continue


def _pool(
    run: Run, name: str, row: dict[str, list[Any]], prompt: list[int], answer: list[int], *, compare: bool
) -> None:
    _ask(run, name, row, "pool", prompt)
    if compare and answer:
        run.forget(name)
        again = run.call(name, "ask", prompts=[prompt], tokens=ANSWER)["answers"][0]
        row.setdefault("same", []).append(again == answer)


def _ask(run: Run, name: str, row: dict[str, list[Any]], kind: str, prompt: list[int]) -> None:
    answer = run.call(name, "ask", prompts=[prompt], tokens=1)
    row.setdefault(kind, []).append(answer["first"][0] * 1e3)
    row.setdefault(f"{kind} cached", []).append(answer["cached"][0])


def show(results: dict[str, Any], options: Any, rate: float) -> list[str]:
    """`rate`: GB/s of pinned copies into the GPU."""
    limit_is = f"GPU hit + {_BUS} x bytes / {rate:.1f} GB/s + {_EXTRA:.0f} ms"
    lines = [f"time to first token, ms, medians of {options.repeats}; limit: {limit_is}"]
    head = f"{'tokens':>7} {'engine':9} {'cold':>8} {'GPU hit':>8} {'pool':>8} {'limit':>8} {'':7} {'x offload':>9}"
    lines += [f"{head} {'GB/s':>6} {'cached':>7} answers"]
    for length, rows in results.items():
        offload = _median(rows.get("offload", {}).get("pool"))
        own = _median(rows.get("ours", {}).get("pool"))
        for name, row in rows.items():
            cold, hot, pool = (_median(row.get(kind)) for kind in ("cold", "hot", "pool"))
            line = f"{length:>7} {name:9} {_figure(cold)} {_figure(hot)} {_figure(pool)}"
            if pool and hot:
                cached = min(row["pool cached"])
                size = cached * kv_bytes(options.model, options.device)
                limit = hot + _BUS * size / rate / 1e6 + _EXTRA
                speed = size / (pool - hot) / 1e6 if pool > hot else 0.0
                line += f" {limit:8.1f} {'met' if pool <= limit else 'MISSED':7}"
                line += f" {pool / offload:9.2f}" if offload else " " * 10
                same = {True: "the same", False: "DIFFER"}[all(row["same"])] if "same" in row else ""
                line += f" {speed:6.1f} {cached:7} {same}"
                if name == "other" and own:
                    ratio = pool / own
                    line += f"   {ratio:.2f} of ours (limit {_OTHER}: {'met' if ratio <= _OTHER else 'MISSED'})"
            lines.append(line)
    return lines


def measure_together(run: Run, results: dict[str, Any]) -> None:
    """Several prompts at once: seconds until the last one's first token."""
    try:
        for _ in range(max(2, run.options.repeats - 1)):
            for name in run.alive():
                if CONFIGURATIONS[name].reads:
                    continue
                row = results.setdefault(name, {})
                prompts = [run.prompt(run.options.together_length) for _ in range(run.options.together)]
                try:
                    run.forget(name, pool=True)
                    row.setdefault("cold", []).append(run.call(name, "ask", prompts=prompts, tokens=1)["all"])
                    if CONFIGURATIONS[name].transfer:
                        run.saved(name, run.options.together * run.options.together_length)
                        run.forget(name)
                        answer = run.call(name, "ask", prompts=prompts, tokens=1)
                        row.setdefault("pool", []).append(answer["all"])
                        row.setdefault("cached", []).append(sum(answer["cached"]))
                    run.forget(name)
                except Failed:
                    continue
    except OutOfTime:
        print("out of time: fewer repeats than asked for", flush=True)


def show_together(results: dict[str, Any], options: Any) -> list[str]:
    lines = [
        f"{options.together} prompts of {options.together_length} tokens at once, ms until all have a token (medians)"
    ]
    for name, row in results.items():
        cold, pool = (_median(row.get(kind)) for kind in ("cold", "pool"))
        cached = f"   from the pool {row['cached']}" if "cached" in row else ""
        lines.append(f"        {name:9} cold {_figure(cold, 1e3)}   pool {_figure(pool, 1e3)}{cached}")
    return lines


def _median(values: list[float] | None) -> float:
    return statistics.median(values) if values else 0.0


def _figure(value: float, factor: float = 1.0) -> str:
    return f"{value * factor:8.1f}" if value else f"{'':8}"
