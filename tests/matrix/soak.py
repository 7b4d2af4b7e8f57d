"""`scripts/soak`: histories of the matrix at random, and the seed of each that fails.

    python -m tests.matrix.soak --minutes 20          random histories for so long
    python -m tests.matrix.soak --seed 7              that history alone
    python -m tests.matrix.soak --seed 7 --minutes 5  histories 7, 8, 9, ... for so long

Each history is played in a process of its own, so that nothing that one leaves behind is another's.
"""

import argparse
import faulthandler
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.hosts import remove_hosts_of
from tests.matrix import handover, pool_acts, requests
from tests.matrix.cells import (
    HANDOVER,
    HANDOVER_HOSTS,
    HOSTS,
    LOCAL,
    ON_HOSTS,
    REQUESTS,
    REQUESTS_HOSTS,
    History,
    cells,
    choose,
)
from tests.matrix.outcome import Outcome
from tests.matrix.permissions import why_no_hosts

LONGEST = 300.0  # seconds that a history may take in all
UNWINDING = 30.0  # seconds that it has to end after that
KEPT = Path(__file__).parents[2] / ".cache" / "soak"
PLAYERS = {
    LOCAL: pool_acts.play,
    HOSTS: pool_acts.play,
    REQUESTS: requests.play,
    REQUESTS_HOSTS: requests.play,
    HANDOVER: handover.play,
    HANDOVER_HOSTS: handover.play,
}


def play(history: History, folder: Path) -> Outcome:
    """In this process; logs, notes and stacks are left in `folder`."""
    return PLAYERS[history.scene](history, folder)


class Total:
    """Of many histories."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.played = self.calls = self.gets = 0
        self.failed: list[int] = []
        self.skipped: Counter[str] = Counter()
        self.cells: Counter[tuple[str, ...]] = Counter()
        self.slowest: dict[str, float] = {}
        self.healing = 0.0

    def add(self, outcome: dict[str, Any]) -> None:
        self.played += 1
        self.calls += outcome["calls"]
        self.gets += outcome["gets"]
        self.cells.update(tuple(cell) for cell in outcome["cells"])
        self.skipped.update(outcome["skipped"])
        for name, seconds in outcome["slowest"].items():
            self.slowest[name] = max(seconds, self.slowest.get(name, 0.0))
        self.healing = max([self.healing, *outcome["healing"].values()])

    def report(self) -> str:
        minutes = (time.monotonic() - self.started) / 60
        slowest = sorted(self.slowest.items(), key=lambda item: -item[1])[:5]
        acts, seen, failed = sum(self.cells.values()), len(self.cells), len(self.failed)
        calls = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in slowest) or "none"
        lines = [
            f"{minutes:.1f} minutes: {self.played} histories, {acts} acts in {seen} of {len(cells())} cells",
            f"{failed} histories failed",
            f"{self.calls} calls, {self.gets} values read and compared",
            f"slowest calls: {calls}",
            f"longest until all was well again: {self.healing:.1f} s",
        ]
        lines += [f"skipped {count} times: {why}" for why, count in self.skipped.items()]
        return "\n".join(lines)


def run(seed: int, folder: Path) -> tuple[dict[str, Any] | None, str]:
    """Play one in a process of its own: its outcome, and what it printed.  None: it ended without one, or did not
    end."""
    command = [sys.executable, "-m", "tests.matrix.soak", "--play", str(folder), "--seed", str(seed)]
    log = folder / "output.log"
    with open(log, "wb") as out:
        player = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)
        try:
            player.wait(LONGEST)
        except subprocess.TimeoutExpired:
            pass
        finally:
            _end(player)
    try:
        return json.loads((folder / "outcome.json").read_text()), log.read_text()
    except OSError:
        return None, log.read_text()


def _end(player: subprocess.Popen[bytes]) -> None:
    """If it still plays: let it put everything away, and put away what it does not."""
    if player.poll() is None:
        player.send_signal(signal.SIGINT)
        try:
            player.wait(UNWINDING)
        except subprocess.TimeoutExpired:
            os.killpg(player.pid, signal.SIGKILL)
            player.wait()
            remove_hosts_of(player.pid)


def soak(seeds: Any, minutes: float, total: Total) -> None:
    end = time.monotonic() + minutes * 60
    no_hosts = why_no_hosts()
    for seed in seeds:
        history = choose(seed)
        if no_hosts and history.scene in ON_HOSTS:
            total.skipped[no_hosts] += 1
        else:
            print(history, flush=True)
            with tempfile.TemporaryDirectory(prefix="soak-") as folder:
                outcome, output = run(seed, Path(folder))
                if outcome is not None:
                    total.add(outcome)
                failures = (
                    outcome["failures"] if outcome is not None else ["it ended without an outcome", output[-6000:]]
                )
                if failures:
                    total.failed.append(seed)
                    _tell(seed, failures, Path(folder))
        if time.monotonic() > end:
            return


def _tell(seed: int, failures: list[str], folder: Path) -> None:
    kept = KEPT / str(seed)
    kept.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if path.is_file():
            (kept / path.name).write_bytes(path.read_bytes())
    print(f"FAILED: seed {seed}; again with: scripts/soak --seed {seed}; logs and notes of all calls: {kept}")
    for failure in failures[:20]:
        print(f"  {failure}")
    if len(failures) > 20:
        print(f"  and {len(failures) - 20} more")
    sys.stdout.flush()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/soak", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, help="how long (default: --seed's history alone, else 20)")
    parser.add_argument("--seed", type=int, help="the first history's seed (default: random ones)")
    parser.add_argument("--play", type=Path, metavar="FOLDER", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.minutes is not None and not options.minutes > 0:
        parser.error("--minutes must be greater than 0")
    for number in (signal.SIGINT, signal.SIGTERM):  # in the background of a shell SIGINT is ignored
        signal.signal(number, signal.default_int_handler)
    if options.play is not None:
        faulthandler.dump_traceback_later(LONGEST - 5, file=sys.stderr)
        outcome = play(choose(options.seed), options.play)
        text = json.dumps({**vars(outcome), "history": str(outcome.history)})
        (options.play / "outcome.json").write_text(text)
        return 0
    if options.seed is None:
        seeds: Any = iter(lambda: random.SystemRandom().randrange(1 << 31), None)
    elif options.minutes is None:
        seeds = [options.seed]
    else:
        seeds = range(options.seed, options.seed + (1 << 31))
    total = Total()
    try:
        soak(seeds, options.minutes or 20, total)
    except KeyboardInterrupt:
        print("ended early")
    print(total.report())
    return 1 if total.failed else 0


if __name__ == "__main__":
    sys.exit(main())
