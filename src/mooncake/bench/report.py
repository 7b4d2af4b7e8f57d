"""The report's files: a workbook with a sheet for every step, charts, and the same figures as JSON.

openpyxl and matplotlib come with the extra `mooncake-py[bench]` and are imported only to write.
"""

import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mooncake.bench.figures import MEANING, METRICS, StepFigures, write_json
from mooncake.errors import ConfigError

_SHARES = ("mean", "p50", "p90", "p99")
_NEEDED = ("openpyxl", "matplotlib")
_INPUT_COLUMNS = ("due (s)", "sent late (ms)", "input tokens", "output tokens")


def check_libraries() -> None:
    """Raises ConfigError, before any work is done, if the report could not be written."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"The report needs {' and '.join(missing)}: install mooncake-py[bench], or give --no-report to see the "
            "figures on the terminal only."
        )


def write_report(folder: Path, settings: dict[str, Any], steps: Sequence[StepFigures]) -> list[Path]:
    """The files that were written into `folder`, which is made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    workbook, data = folder / "results.xlsx", folder / "results.json"
    write_json(data, settings, steps)
    _write_workbook(workbook, settings, steps)
    return [workbook, data, *_draw(folder, [step for step in steps if step.good])]


# ------------------------------------------------------------ workbook


def _write_workbook(path: Path, settings: dict[str, Any], steps: Sequence[StepFigures]) -> None:
    from openpyxl import Workbook

    book = Workbook()
    summary = book.active
    summary.title = "summary"
    _fill_summary(summary, settings, steps)
    for step in steps:
        _fill_step(book.create_sheet(step.name), step)
    for sheet in book.worksheets:
        _shape(sheet)
    book.save(path)


def _fill_summary(sheet: Any, settings: dict[str, Any], steps: Sequence[StepFigures]) -> None:
    times = [f"{metric} {share} (ms)" for metric in METRICS for share in _SHARES]
    sheet.append(
        ["step", "answers", "errors", "seconds", "requests/s", "input tokens/s", "output tokens/s", *times, "note"]
    )
    for step in steps:
        rates = [step.seconds, step.request_rate, step.input_rate, step.output_rate]
        row = [step.name, len(step.good), step.errors, *map(_cell, rates)]
        for metric in METRICS:
            found = step.times(metric)
            row += [_cell(getattr(found, share)) for share in _SHARES]
        sheet.append([*row, step.failure])
    sheet.append([])
    for name, value in settings.items():
        sheet.append([name, str(value)])


def _fill_step(sheet: Any, step: StepFigures) -> None:
    if step.failure:
        sheet.append(["skipped" if step.skipped else "failed", step.failure])
        sheet.append([])
    sheet.append(["ms", *_SHARES, "largest", "values", "meaning"])
    for metric in METRICS:
        found = step.times(metric)
        values = [_cell(getattr(found, share)) for share in (*_SHARES, "largest")]
        sheet.append([metric, *values, found.count, MEANING[metric]])
    for source, count in step.sources.items():
        sheet.append([f"decode's prompt tokens: {source}", count])
    sheet.append([])
    sheet.append([*_INPUT_COLUMNS, *(f"{metric} (ms)" for metric in ("ttft", "tpot", "e2el")), "error"])
    for answer in step.answers:
        whole = [answer.ttft, answer.tpot, answer.e2el] if not answer.error else [None] * 3
        sheet.append(
            [
                _cell(answer.due),
                _cell(answer.sent * 1e3),
                answer.input_tokens,
                answer.output_tokens,
                *(None if value is None else _cell(value * 1e3) for value in whole),
                answer.error,
            ]
        )


def _cell(value: float) -> float | None:
    return round(value, 3) if math.isfinite(value) else None


def _shape(sheet: Any) -> None:
    from openpyxl.styles import Font
    from openpyxl.utils import get_column_letter

    for cell in sheet[1]:
        cell.font = Font(bold=True)
    for number in range(1, sheet.max_column + 1):
        sheet.column_dimensions[get_column_letter(number)].width = 16
    sheet.freeze_panes = "B2"


# ------------------------------------------------------------ charts


def _draw(folder: Path, steps: Sequence[StepFigures]) -> list[Path]:
    if not steps:
        return []
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = [step.name for step in steps]
    latency, throughput, spread = folder / "latency.png", folder / "throughput.png", folder / "ttft.png"

    figure = Figure(figsize=(11, 8), layout="constrained")
    FigureCanvasAgg(figure)
    for place, metric in zip(figure.subplots(2, 2).flat, METRICS, strict=True):
        _bars(place, names, [[getattr(step.times(metric), share) for step in steps] for share in _SHARES])
        place.set_title(f"{metric} (ms)")
    figure.savefig(latency)

    figure = Figure(figsize=(11, 4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for place, rates, title in (
        (left, [step.output_rate for step in steps], "output tokens/s"),
        (right, [step.request_rate for step in steps], "requests/s"),
    ):
        place.bar(range(len(names)), rates)
        place.set_xticks(range(len(names)), names)
        place.set_title(title)
    figure.savefig(throughput)

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    place = figure.subplots()
    for step in steps:
        values = sorted(value * 1e3 for value in step.values("ttft"))
        place.step(values, [(number + 1) / len(values) for number in range(len(values))], where="post", label=step.name)
    place.set_title("requests whose first token came within this time")
    place.set_xlabel("ttft (ms)")
    place.legend()
    figure.savefig(spread)
    return [latency, throughput, spread]


def _bars(place: Any, names: list[str], rows: list[list[float]]) -> None:
    """Groups of bars: one group a step, one bar a share."""
    width = 0.8 / len(rows)
    for number, (share, values) in enumerate(zip(_SHARES, rows, strict=True)):
        place.bar([group + number * width for group in range(len(names))], values, width, label=share)
    place.set_xticks([group + 0.4 - width / 2 for group in range(len(names))], names)
    place.legend()
