"""The figures of one step, from its answers."""

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mooncake.bench.load import Answered
from mooncake.bench.summary import Summary

METRICS = ("ttft", "tpot", "itl", "e2el")
MEANING = {
    "ttft": "from when a request was due to its first token",
    "tpot": "per token after the first, one value a request",
    "itl": "between two events with tokens",
    "e2el": "from when a request was due to its last token",
}
_SHOWN_ERRORS = 5


@dataclass
class StepFigures:
    """One step: its answers and what they come to.  `failure` says why it was not run, or not to its end."""

    name: str
    answers: list[Answered] = field(default_factory=list)
    seconds: float = 0.0  # from the first request's time to the last answer's end
    sources: dict[str, float] = field(
        default_factory=dict
    )  # prompt tokens of the decode instances, by where KV came from
    failure: str = ""
    skipped: bool = False  # the machine is too small for it

    @property
    def good(self) -> list[Answered]:
        return [answer for answer in self.answers if not answer.error]

    @property
    def errors(self) -> int:
        return len(self.answers) - len(self.good)

    @property
    def passed(self) -> bool:
        return self.skipped or not (self.failure or self.errors)

    @property
    def output_rate(self) -> float:
        """Tokens a second."""
        return self._rate(sum(answer.output_tokens for answer in self.good))

    @property
    def input_rate(self) -> float:
        return self._rate(sum(answer.input_tokens for answer in self.good))

    @property
    def request_rate(self) -> float:
        """Whole answers a second."""
        return self._rate(len(self.good))

    def times(self, metric: str) -> Summary:
        """Milliseconds; of whole answers."""
        return Summary.of(self.values(metric)).scaled(1e3)

    def values(self, metric: str) -> list[float]:
        """Seconds."""
        if metric == "itl":
            return [gap for answer in self.good for gap in answer.gaps]
        found = [getattr(answer, metric) for answer in self.good]
        return [value for value in found if value is not None]

    def lateness(self) -> Summary:
        """How late the generator sent, in milliseconds."""
        return Summary.of([answer.sent for answer in self.answers]).scaled(1e3)

    def common_errors(self) -> list[tuple[str, int]]:
        return Counter(answer.error for answer in self.answers if answer.error).most_common(_SHOWN_ERRORS)

    def _rate(self, count: float) -> float:
        return count / self.seconds if self.seconds else math.nan

    def text(self) -> str:
        """The figures as the command prints them."""
        if self.failure:
            return f"{self.name}: {'skipped: ' if self.skipped else ''}{self.failure}"
        rates = (
            f"{self.request_rate:.2f} requests/s, {self.input_rate:.0f} input tokens/s, "
            f"{self.output_rate:.0f} output tokens/s"
        )
        lines = [
            f"{self.name}: {len(self.good)} answers in {self.seconds:.2f} s, {self.errors} errors; {rates}",
            f"  {'ms':<6}{'mean':>10}{'p50':>10}{'p90':>10}{'p99':>10}",
        ]
        for metric in METRICS:
            times = self.times(metric)
            lines.append(f"  {metric:<6}{times.mean:>10.2f}{times.p50:>10.2f}{times.p90:>10.2f}{times.p99:>10.2f}")
        if self.sources:
            told = ", ".join(f"{source} {count:.0f}" for source, count in self.sources.items())
            lines.append(f"  decode's prompt tokens by source: {told}")
        late = self.lateness()
        lines.append(f"  requests were sent {late.p50:.2f} ms late (p50), {late.p99:.2f} ms (p99)")
        lines += [f"  {count} x {error}" for error, count in self.common_errors()]
        return "\n".join(lines)

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        times = {metric: self.times(metric) for metric in METRICS} if self.answers else {}
        return {
            "step": self.name,
            "failure": self.failure,
            "skipped": self.skipped,
            "answers": len(self.good),
            "errors": self.errors,
            "seconds": _number(self.seconds),
            "requests_per_s": _number(self.request_rate),
            "input_tokens_per_s": _number(self.input_rate),
            "output_tokens_per_s": _number(self.output_rate),
            "decode_prompt_tokens_by_source": self.sources,
            "milliseconds": {
                metric: {name: _number(getattr(one, name)) for name in ("mean", "p50", "p90", "p99")}
                for metric, one in times.items()
            },
            "messages": [error for error, _ in self.common_errors()],
        }


def measured(name: str, answers: Sequence[Answered]) -> StepFigures:
    """The figures of a run's answers."""
    end = max((answer.due + answer.e2el for answer in answers), default=0.0)
    return StepFigures(name, list(answers), end)


def write_json(path: Path, settings: dict[str, Any], steps: Sequence[StepFigures]) -> None:
    content = {"settings": settings, "steps": [step.plain() for step in steps]}
    path.write_text(json.dumps(content, indent=2) + "\n")


def _number(value: float) -> float | None:
    """JSON has no NaN."""
    return round(value, 4) if math.isfinite(value) else None
