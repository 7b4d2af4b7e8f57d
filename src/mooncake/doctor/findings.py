"""What the doctor says: one line for each thing looked at.

A finding is OK only if it was really checked.  What could not be is UNKNOWN, with the reason, and never counts as good.
"""

import json
import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum


class Status(StrEnum):
    OK = "ok"
    WARN = "warn"  # works, though not as it could, or not for long
    FAIL = "fail"  # does not work
    UNKNOWN = "unknown"  # could not be checked


@dataclass(frozen=True)
class Finding:
    """`subject`: what was looked at; `text`: what was found; `advice`: what to do, empty if nothing."""

    status: Status
    area: str
    subject: str
    text: str
    advice: str = ""


def ok(area: str, subject: str, text: str) -> Finding:
    return Finding(Status.OK, area, subject, text)


def warn(area: str, subject: str, text: str, advice: str = "") -> Finding:
    return Finding(Status.WARN, area, subject, text, advice)


def fail(area: str, subject: str, text: str, advice: str = "") -> Finding:
    return Finding(Status.FAIL, area, subject, text, advice)


def unknown(area: str, subject: str, text: str, advice: str = "") -> Finding:
    return Finding(Status.UNKNOWN, area, subject, text, advice)


_COLOURS = {Status.OK: "32", Status.WARN: "33", Status.FAIL: "31", Status.UNKNOWN: "36"}
_STATUS_WIDTH = max(map(len, Status)) + 2
_NARROWEST = 60


def as_table(findings: Sequence[Finding], quiet: bool) -> str:
    """For people.  `quiet` leaves out what is ok."""
    shown = [finding for finding in findings if not (quiet and finding.status is Status.OK)]
    width = max(shutil.get_terminal_size((110, 24)).columns, _NARROWEST)
    subject_width = min(max((len(finding.subject) for finding in shown), default=0), width // 3) + 2
    colours = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    lines: list[str] = []
    area = ""
    for finding in shown:
        if finding.area != area:
            area = finding.area
            lines.append(f"{area}")
        lines += _lines(finding, subject_width, width, colours)
    counts = [f"{sum(one.status is status for one in findings)} {status}" for status in Status]
    return "\n".join([*lines, ", ".join(counts)])


def _lines(finding: Finding, subject_width: int, width: int, colours: bool) -> list[str]:
    indent = " " * (2 + _STATUS_WIDTH)
    status = f"{finding.status:<{_STATUS_WIDTH}}"
    if colours:
        status = f"\033[{_COLOURS[finding.status]}m{status}\033[0m"
    subject = f"{finding.subject:<{subject_width}}"
    text = textwrap.wrap(finding.text, width - len(indent) - subject_width) or [""]
    lines = [f"  {status}{subject}{text[0]}"]
    lines += [indent + " " * subject_width + rest for rest in text[1:]]
    if finding.advice:
        advice = textwrap.wrap(f"→ {finding.advice}", width - len(indent) - subject_width, break_on_hyphens=False)
        lines += [indent + " " * subject_width + part for part in advice]
    return lines


def as_json(findings: Sequence[Finding]) -> str:
    """For programs."""
    content = {"ok": exit_code(findings) == 0, "findings": [asdict(finding) for finding in findings]}
    return json.dumps(content, indent=2)


def exit_code(findings: Sequence[Finding]) -> int:
    """1 if anything does not work."""
    return int(any(finding.status is Status.FAIL for finding in findings))
