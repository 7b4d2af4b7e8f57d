"""Runs checks side by side, each within its time: one that hangs is reported as such and left behind."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mooncake.doctor.findings import Finding, unknown

_GRACE = 0.5  # seconds beyond its limit that a check may take to say so itself


@dataclass(frozen=True)
class Check:
    area: str
    subject: str
    look: Callable[[], list[Finding]]
    limit: float  # seconds


@dataclass
class _Running:
    check: Check
    findings: list[Finding] | None = None
    error: Exception | None = None
    thread: threading.Thread = field(default_factory=threading.Thread)

    def run(self) -> None:
        try:
            self.findings = self.check.look()
        except Exception as error:
            self.error = error


def run_all(checks: Sequence[Check]) -> list[Finding]:
    """What all of them found, in their order; takes as long as the largest limit at most."""
    running = [_Running(check) for check in checks]
    start = time.monotonic()
    for one in running:
        one.thread = threading.Thread(target=one.run, name=f"doctor-{one.check.subject}", daemon=True)
        one.thread.start()
    findings: list[Finding] = []
    for one in running:
        one.thread.join(max(start + one.check.limit + _GRACE - time.monotonic(), 0))
        findings += _result(one)
    return findings


def _result(one: _Running) -> list[Finding]:
    check = one.check
    if one.error is not None:
        return [unknown(check.area, check.subject, f"not checked: {type(one.error).__name__}: {one.error}")]
    if one.findings is None:
        return [unknown(check.area, check.subject, f"not checked: it took longer than {check.limit:g} s")]
    return one.findings
