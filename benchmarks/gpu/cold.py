"""What saving costs a prompt that is computed: engines with a pool beside one without, in turn.

A round is none, then every other engine, then none again: the two nones show how much equal runs differ (A/A).
"""

import statistics
from typing import Any

from benchmarks.gpu.run import OutOfTime, Run
from benchmarks.gpu.services import Failed

_LIMIT = 1.03


def measure(run: Run, results: dict[str, Any]) -> None:
    """Fills `results`: by engine the ms of each round, of `none` two a round."""
    length = run.options.cold_length
    others = [name for name in run.alive(pool_only=True) if name != "other"]
    if "none" not in run.alive() or not others:
        print("cold: needs the engine none and another one", flush=True)
        return
    try:
        for repeat in range(run.options.cold_repeats + 1):
            order = others if repeat % 2 else others[::-1]
            for kind, name in (("none", "none"), *((each, each) for each in order), ("none again", "none")):
                if name not in run.alive():
                    continue
                try:
                    run.forget(name, pool=True)
                    answer = run.call(name, "ask", prompts=[run.prompt(length)], tokens=1)
                    if repeat:  # the first warms up
                        results.setdefault(kind, []).append(answer["first"][0] * 1e3)
                    run.saved(name, length)
                    run.forget(name)
                except Failed:
                    if name == "none":
                        return
    except OutOfTime:
        print("out of time: fewer repeats than asked for", flush=True)


def show(results: dict[str, Any], options: Any) -> list[str]:
    first, again = results.get("none", []), results.get("none again", [])
    if not first or not again:
        return []
    same = [b / a for a, b in zip(first, again, strict=False)]
    both = statistics.median([*first, *again])
    spread = f"A/A {statistics.median(same):.3f} ({min(same):.3f} to {max(same):.3f})"
    lines = [f"computing {options.cold_length} tokens while saving them, {len(same)} rounds in turn; medians, ms"]
    lines += [f"        {'none':9} {both:8.1f}   {spread}, of the two runs of a round; ratios are to their mean"]
    for name, values in results.items():
        if name.startswith("none"):
            continue
        ratios = [2 * value / (a + b) for value, a, b in zip(values, first, again, strict=False)]
        ratio = statistics.median(ratios) if ratios else 0.0
        lines.append(
            f"        {name:9} {statistics.median(values):8.1f}   {ratio:.3f} "
            f"({min(ratios):.3f} to {max(ratios):.3f}), "
            f"limit {_LIMIT}: {'met' if ratio <= _LIMIT else 'MISSED'}"
        )
    return lines
