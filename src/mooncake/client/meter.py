"""What a store client counts: values, bytes, times and errors, for its /metrics.

Names that the C++ client has are kept, with its meaning (times in microseconds); the others are ours.
"""

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from mooncake.errors import ErrorCode
from mooncake.rpc.figures import Histogram, by_label, counter, gauge, label
from mooncake.rpc.segment_messages import Family

if TYPE_CHECKING:
    from mooncake.client.client import StoreClient
    from mooncake.rpc.messages import Found

_KEPT = int(ErrorCode.OBJECT_ALREADY_EXISTS)
_MISSING = int(ErrorCode.OBJECT_NOT_FOUND)


class Meter:
    """Thread-safe.  Nothing is counted until `on` is set: a small put or get would take a twentieth longer for it."""

    def __init__(self) -> None:
        self.on = False
        self.put_time, self.batch_put_time = Histogram(), Histogram()
        self.get_time, self.batch_get_time = Histogram(), Histogram()
        self._stored = self._kept = self._not_stored = 0
        self._found = self._missing = self._not_read = 0
        self.disk_bytes = 0
        self.mismatches = 0  # replicas that were read and had other bytes than their checksum says
        self._errors = Counter[str]()
        self._calls: dict[str, Histogram] = {}
        self._lock = threading.Lock()

    def put(self, codes: Sequence[int], time: Histogram, seconds: float) -> None:
        """Values were to be stored; a code each."""
        if not self.on:
            return
        time.observe(seconds)
        if not any(codes):
            with self._lock:
                self._stored += len(codes)
            return
        tally = Counter(codes)
        with self._lock:
            self._stored += tally.pop(0, 0)
            self._kept += tally.pop(_KEPT, 0)
            self._not_stored += tally.total()
            self._count_errors(tally)

    def got(self, time: Histogram, seconds: float) -> None:
        """Values were read, or not; see looked_up and not_read."""
        if self.on:
            time.observe(seconds)

    def looked_up(self, answers: "Sequence[int | Found]") -> None:
        """The master was asked for values to be read; a code or where it is, a value."""
        if not self.on:
            return
        codes = [answer for answer in answers if isinstance(answer, int)]
        with self._lock:
            self._found += len(answers) - len(codes)
            self._missing += codes.count(_MISSING)
        self.not_read(codes)

    def not_read(self, codes: Sequence[int]) -> None:
        """Reading ended with these codes; 0 and a missing value are no failures."""
        if not self.on or not any(codes):
            return
        tally = Counter(codes)
        del tally[0], tally[_MISSING]
        with self._lock:
            self._not_read += tally.total()
            self._count_errors(tally)

    def called(self, name: str, seconds: float) -> None:
        """The master was asked, and has answered or not."""
        time = self._calls.get(name)
        if time is None:
            with self._lock:
                time = self._calls.setdefault(name, Histogram())
        time.observe(seconds)

    def _count_errors(self, tally: Mapping[int, int]) -> None:
        for code, count in tally.items():
            try:
                name = ErrorCode(code).name
            except ValueError:
                name = str(code)
            self._errors[name] += count

    def families(self, client: "StoreClient") -> list[Family]:
        """All metrics of the client and of its own segment servers."""
        moved, read = client.attachments.moved, client.attachments.read
        read_bytes = sum(read.values()) + self.disk_bytes
        with self._lock:
            errors, calls = dict(self._errors), dict(self._calls)
            puts = {"stored": self._stored, "kept": self._kept, "failed": self._not_stored}
            gets = {"found": self._found, "missing": self._missing, "failed": self._not_read}
        counts = {name: time.count for name, time in calls.items()}
        return [
            counter("mooncake_transfer_read_bytes", "Bytes read.", read_bytes),
            counter("mooncake_transfer_write_bytes", "Bytes written.", sum(moved.values()) - read_bytes),
            self.put_time.family("mooncake_transfer_put_latency", "Puts of one value (us)."),
            self.get_time.family("mooncake_transfer_get_latency", "Gets of one value (us)."),
            self.batch_put_time.family("mooncake_transfer_batch_put_latency", "Puts of batches (us)."),
            self.batch_get_time.family("mooncake_transfer_batch_get_latency", "Gets of batches (us)."),
            by_label("mooncake_client_puts_total", "Values put, by what came of them.", "result", puts),
            by_label("mooncake_client_gets_total", "Values asked for, by what came of it.", "result", gets),
            by_label("mooncake_client_errors_total", "Values that ended with an error.", "code", errors),
            by_label("mooncake_client_transferred_bytes_total", "Bytes moved, by transport.", "transport", moved),
            by_label("mooncake_client_read_bytes_total", "Bytes read from memory, by transport.", "transport", read),
            counter(
                "mooncake_client_checksum_mismatches_total",
                "Replicas whose bytes were not what their checksum says.",
                self.mismatches,
            ),
            counter("mooncake_client_disk_reads_total", "Reads of values only on disk.", client.disks.reads),
            counter("mooncake_client_disk_read_bytes_total", "Bytes read from disk.", self.disk_bytes),
            gauge("mooncake_client_master_reachable", "Whether the last call reached it.", not client.rpc.down),
            by_label("mooncake_client_rpc_count", "Calls to the master.", "rpc_name", counts),
            *(
                time.family("mooncake_client_rpc_latency", "Calls to the master (us).", label("rpc_name", name))
                for name, time in calls.items()
            ),
            *client.mounts.figures(),
        ]
