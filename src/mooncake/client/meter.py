"""What a store client counts: values, bytes, times and errors, for its /metrics.

Names that the C++ client has are kept, with its meaning (times in microseconds); the others are ours.
"""

import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from mooncake.errors import ErrorCode
from mooncake.rpc.figures import Histogram, by_label, counter, gauge, label
from mooncake.rpc.segment_messages import Family

if TYPE_CHECKING:
    from mooncake.client.client import StoreClient

_KEPT = int(ErrorCode.OBJECT_ALREADY_EXISTS)
_MISSING = int(ErrorCode.OBJECT_NOT_FOUND)


class Meter:
    """Thread-safe."""

    def __init__(self) -> None:
        self.put_time, self.batch_put_time = Histogram(), Histogram()
        self.get_time, self.batch_get_time = Histogram(), Histogram()
        self.puts = Counter[str](stored=0, kept=0, failed=0)
        self.gets = Counter[str](found=0, missing=0, failed=0)
        self.disk_bytes = 0
        self._errors = Counter[str]()
        self._calls: dict[str, Histogram] = {}
        self._lock = threading.Lock()

    def put(self, codes: Iterable[int], time: Histogram, seconds: float) -> None:
        """Values were to be stored; a code each."""
        time.observe(seconds)
        tally = Counter(codes)
        with self._lock:
            self.puts["stored"] += tally.pop(0, 0)
            self.puts["kept"] += tally.pop(_KEPT, 0)
            self.puts["failed"] += tally.total()
            self._count_errors(tally)

    def looked_up(self, found: int, missing: int) -> None:
        """The master was asked for values to be read."""
        with self._lock:
            self.gets["found"] += found
            self.gets["missing"] += missing

    def not_read(self, codes: Iterable[int]) -> None:
        """Reading ended with these codes; 0 and a missing value are none."""
        tally = Counter(codes)
        del tally[0], tally[_MISSING]
        if tally:
            with self._lock:
                self.gets["failed"] += tally.total()
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
        counts = {name: time.count for name, time in calls.items()}
        return [
            counter("mooncake_transfer_read_bytes", "Bytes read.", read_bytes),
            counter("mooncake_transfer_write_bytes", "Bytes written.", sum(moved.values()) - read_bytes),
            self.put_time.family("mooncake_transfer_put_latency", "Puts of one value (us)."),
            self.get_time.family("mooncake_transfer_get_latency", "Gets of one value (us)."),
            self.batch_put_time.family("mooncake_transfer_batch_put_latency", "Puts of batches (us)."),
            self.batch_get_time.family("mooncake_transfer_batch_get_latency", "Gets of batches (us)."),
            by_label("mooncake_client_puts_total", "Values put, by what came of them.", "result", self.puts),
            by_label("mooncake_client_gets_total", "Values asked for, by what came of it.", "result", self.gets),
            by_label("mooncake_client_errors_total", "Values that ended with an error.", "code", errors),
            by_label("mooncake_client_transferred_bytes_total", "Bytes moved, by transport.", "transport", moved),
            by_label("mooncake_client_read_bytes_total", "Bytes read from memory, by transport.", "transport", read),
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
