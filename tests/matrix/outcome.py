"""What came of one history."""

from collections import Counter
from dataclasses import dataclass, field

from tests.invariants.history import Verdict
from tests.matrix.cells import History


@dataclass
class Outcome:
    history: History
    failures: list[str] = field(default_factory=list)
    cells: list[tuple[str, str, str]] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)  # why acts were left out
    calls: int = 0
    gets: int = 0
    codes: Counter[str] = field(default_factory=Counter)
    slowest: dict[str, float] = field(default_factory=dict)
    healing: dict[str, float] = field(default_factory=dict)  # act → seconds until all was well again

    def fail(self, *texts: str) -> None:
        self.failures += texts

    def healed(self, act: str, seconds: float) -> None:
        self.healing[act] = max(seconds, self.healing.get(act, 0.0))

    def judged(self, verdict: Verdict) -> None:
        self.fail(*verdict.wrong)
        self.calls += verdict.calls
        self.gets += verdict.gets
        self.codes += verdict.codes
        for name, seconds in verdict.slowest.items():
            self.slowest[name] = max(seconds, self.slowest.get(name, 0.0))
