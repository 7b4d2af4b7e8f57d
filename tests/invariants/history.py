"""What many processes did to the same keys, noted by each as it goes, and judged afterwards.

A process that is killed leaves its note of what it had begun.  Times are of the clock that all processes of the host
share.
"""

import json
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NEVER = float("inf")


@dataclass
class Call:
    """One call.  `wrote` {key: version} is what it was to put; `replaces` whether it does so where something is;
    `removed` keys it was to remove, `keys` what else it asked about; `saw` {key: version} what it returned; `codes` the
    result of each key."""

    name: str
    process: str
    start: float
    end: float = NEVER
    wrote: dict[str, int] = field(default_factory=dict)
    replaces: bool = False
    removed: list[str] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    saw: dict[str, int] = field(default_factory=dict)
    codes: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)


class Notes:
    """The file that one process writes: a line before a call and a line after it."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115
        self._number = 0

    @contextmanager
    def call(self, name: str, **about: Any) -> Iterator[dict[str, Any]]:
        """About the call before, and in the mapping that is given what came of it."""
        self._number += 1
        self._write([self._number, time.monotonic(), name, about])
        result: dict[str, Any] = {}
        yield result
        self._write([self._number, time.monotonic(), result])

    def _write(self, line: list[Any]) -> None:
        self._file.write(json.dumps(line).encode() + b"\n")


def read(paths: Iterable[Path]) -> list[Call]:
    """All calls of all processes; those without an end were never answered."""
    calls: list[Call] = []
    for path in paths:
        open_calls: dict[int, Call] = {}
        for line in path.read_bytes().splitlines(keepends=True):
            if not line.endswith(b"\n"):
                continue  # it was killed in the middle of it
            number, moment, *rest = json.loads(line)
            if len(rest) == 2:
                open_calls[number] = Call(rest[0], path.stem, moment, **rest[1])
                calls.append(open_calls[number])
            else:
                call = open_calls.pop(number)
                call.end = moment
                for name, what in rest[0].items():
                    setattr(call, name, what)
    return calls


@dataclass
class Verdict:
    """`wrong`: what must never be.  The rest are figures."""

    wrong: list[str]
    calls: int
    gets: int
    codes: Counter[str]
    slowest: dict[str, float]


class _Key:
    """What happened to one key."""

    def __init__(self) -> None:
        self.puts: dict[int, Call] = {}
        self.over: list[tuple[float, float, int]] = []  # (start, end, version) of what took a former value's place


def judge(calls: list[Call], forgotten: Iterable[tuple[float, float]] = ()) -> Verdict:
    """Wrong is a get that returned what nobody had put under that key by then, or what had been replaced or removed
    before it began.  `forgotten`: spans of time in which the pool may forget a removal, as it may when a master is
    killed that was the only one to know of it (docs/snapshots.md)."""
    spans = list(forgotten)
    keys: dict[str, _Key] = defaultdict(_Key)
    wrong = [f"{call.process}: {call.name}: {text}" for call in calls for text in call.wrong]
    for call in calls:
        for key, version in call.wrote.items():
            keys[key].puts[version] = call
            if call.replaces and call.codes.get(key) == 0:
                keys[key].over.append((call.start, call.end, version))
        for key in call.removed:
            if call.codes.get(key) == 0 and not any(a <= call.end and call.start <= b for a, b in spans):
                keys[key].over.append((call.start, call.end, -1))
    gets = 0
    for call in calls:
        for key, version in call.saw.items():
            gets += 1
            put = keys[key].puts.get(version)
            where = f"{call.process}: {call.name} of {key} at {call.start:.3f}"
            if put is None or put.start > call.end:
                wrong.append(f"{where}: version {version}, which nobody had put")
            elif put.codes.get(key) == 0:
                for start, end, later in keys[key].over:
                    if start > put.end and end < call.start:
                        what = f"version {later} had taken its place" if later >= 0 else "it had been removed"
                        wrong.append(f"{where}: version {version} of {put.end:.3f}, though {what} by {end:.3f}")
                        break
    codes: Counter[str] = Counter()
    slowest: dict[str, float] = {}
    for call in calls:
        codes.update(f"{call.name}:{code}" for code in call.codes.values())
        if call.end < NEVER:
            slowest[call.name] = max(slowest.get(call.name, 0.0), call.end - call.start)
    return Verdict(wrong, len(calls), gets, codes, slowest)
