"""`mooncake bench stress`: a check of the data path in two roles, on one host or two.

Prefill puts values that describe themselves, decode gets them and compares every byte.  Either may be started first:
decode waits for what prefill has not put yet.  Times are those of the store's calls alone; making and comparing values
is not part of them.
"""

import argparse
import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mooncake.bench.summary import Summary
from mooncake.bench.values import Values
from mooncake.errors import ErrorCode, MooncakeError
from mooncake.store import MooncakeDistributedStore

_POLL = 0.05  # seconds between two looks for keys that are not there yet
_WAITABLE = (ErrorCode.OBJECT_NOT_FOUND, ErrorCode.REPLICA_IS_NOT_READY)


class StressFailed(MooncakeError):
    """The data path is not right, or not there.  The text is one sentence."""


@dataclass
class _Tally:
    """What one worker did."""

    seconds: list[float] = field(default_factory=list)  # of every call
    values: int = 0


class _Worker:
    """One thread's share of the values: its numbers, its registered memory, its calls."""

    def __init__(self, store: MooncakeDistributedStore, options: argparse.Namespace, numbers: range) -> None:
        self._store, self._options, self._numbers = store, options, numbers
        self._values = Values(options.value_length, options.seed)
        self._room: np.ndarray[Any, np.dtype[np.uint8]] = np.zeros(options.batch_size * options.value_length, np.uint8)
        self._address = int(self._room.ctypes.data)
        self.tally = _Tally()
        if code := store.register_buffer(self._address, len(self._room)):
            raise StressFailed(f"{len(self._room)} bytes could not be registered ({_named(code)}).")

    def put(self, stopped: threading.Event) -> None:
        """Raises StressFailed."""
        for batch in self._batches():
            if stopped.is_set():
                return
            for place, number in enumerate(batch):
                self._values.fill(self._slot(place), number)
            keys, addresses, sizes = self._arguments(batch)
            start = time.perf_counter()
            codes = self._store.batch_put_from(keys, addresses, sizes)
            self._count(start, len(batch))
            for key, code in zip(keys, codes, strict=True):
                if code:
                    raise StressFailed(
                        f"The put of {key} failed with {_named(code)}{_put_advice(code, self._options)}."
                    )

    def get(self, stopped: threading.Event) -> None:
        """Raises StressFailed."""
        for batch in self._batches():
            keys, addresses, sizes = self._arguments(batch)
            self._wait_for(keys, stopped)
            if stopped.is_set():
                return
            self._room[: len(batch) * self._options.value_length] = 0  # so that nothing of the last batch can pass
            start = time.perf_counter()
            results = self._store.batch_get_into(keys, addresses, sizes)
            self._count(start, len(batch))
            for place, (key, result) in enumerate(zip(keys, results, strict=True)):
                self._check(key, result, place, batch[place])

    def close(self) -> None:
        self._store.unregister_buffer(self._address)

    def _check(self, key: str, result: int, place: int, number: int) -> None:
        if result < 0:
            raise StressFailed(f"The get of {key} failed with {_named(result)}{_get_advice(result)}.")
        if result != self._options.value_length:
            raise StressFailed(f"{key} has {result} bytes, but {self._options.value_length} were put.")
        if fault := self._values.fault(self._slot(place), number):
            raise StressFailed(f"{key} is corrupt: {fault}.")

    def _wait_for(self, keys: list[str], stopped: threading.Event) -> None:
        deadline = time.monotonic() + self._options.wait_time
        while not stopped.is_set():
            codes = self._store.batch_is_exist(keys)
            broken = next((code for code in codes if code < 0 and code not in _WAITABLE), 0)
            if broken:
                raise StressFailed(f"The pool could not be asked for {keys[0]}: {_named(broken)}.")
            if all(code == 1 for code in codes):
                return
            if time.monotonic() > deadline:
                missing = [key for key, code in zip(keys, codes, strict=True) if code != 1]
                raise StressFailed(
                    f"{missing[0]} was not in the pool for {self._options.wait_time} s: start --role prefill with "
                    "the same --max-requests, --value-length, --seed and --key-prefix, or give a longer --wait-time; "
                    "if it runs, the pool may be too small for all values."
                )
            stopped.wait(_POLL)

    def _batches(self) -> list[range]:
        size = self._options.batch_size
        return [self._numbers[start : start + size] for start in range(0, len(self._numbers), size)]

    def _arguments(self, batch: range) -> tuple[list[str], list[int], list[int]]:
        length = self._options.value_length
        addresses = [self._address + place * length for place in range(len(batch))]
        return [key_of(self._options, number) for number in batch], addresses, [length] * len(batch)

    def _slot(self, place: int) -> "np.ndarray[Any, np.dtype[np.uint8]]":
        length = self._options.value_length
        return self._room[place * length : (place + 1) * length]

    def _count(self, start: float, values: int) -> None:
        self.tally.seconds.append(time.perf_counter() - start)
        self.tally.values += values


def run(options: argparse.Namespace) -> int:
    """Returns after SIGINT as well; raises StressFailed."""
    store = MooncakeDistributedStore()
    code = store.setup(
        options.local_hostname,
        options.metadata_server,
        options.global_segment_size,
        options.local_buffer_size,
        options.protocol,
        options.device_name,
        options.master_server,
    )
    if code:
        raise StressFailed(
            f"The store could not be set up ({_named(code)}); the line above says why.  Its master is "
            f"{options.master_server}."
        )
    with contextlib.closing(store):
        if options.role == "decode":
            _get_all(store, options)
        else:
            _put_all(store, options)
    return 0


def key_of(options: argparse.Namespace, number: int) -> str:
    return f"{options.key_prefix}/{options.seed}/{options.value_length}/{number}"


def _put_all(store: MooncakeDistributedStore, options: argparse.Namespace) -> None:
    _forget(store, options)  # a put on a key that exists moves nothing
    print(f"prefill: {_plan(options)}", flush=True)
    try:
        _all_workers(store, options, _Worker.put)
        if options.wait_time:
            print(f"The values stay for {options.wait_time} s; decode can read them (Ctrl-C ends it).", flush=True)
            time.sleep(options.wait_time)
    finally:
        _forget(store, options)


def _get_all(store: MooncakeDistributedStore, options: argparse.Namespace) -> None:
    print(f"decode: {_plan(options)}", flush=True)
    _all_workers(store, options, _Worker.get)
    print("Every byte was right.", flush=True)


def _forget(store: MooncakeDistributedStore, options: argparse.Namespace) -> None:
    """Remove what this or an earlier run has put."""
    for start in range(0, options.max_requests, 1000):
        numbers = range(start, min(start + 1000, options.max_requests))
        store.batch_remove([key_of(options, number) for number in numbers], True)


def _all_workers(
    store: MooncakeDistributedStore, options: argparse.Namespace, work: Callable[[_Worker, threading.Event], None]
) -> None:
    """Run `work` in every worker's thread to its end, and report.  Raises the first failure."""
    count = options.num_workers
    shares = [range(first, options.max_requests, count) for first in range(count)]
    workers = [_Worker(store, options, share) for share in shares]
    stopped, failures = threading.Event(), list[StressFailed]()

    def job(worker: _Worker) -> None:
        try:
            work(worker, stopped)
        except StressFailed as failure:
            failures.append(failure)
            stopped.set()

    threads = [threading.Thread(target=job, args=(worker,)) for worker in workers]
    start = time.perf_counter()
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        stopped.set()
        for thread in threads:
            thread.join()
        for worker in workers:
            worker.close()
    elapsed = time.perf_counter() - start
    if failures:
        raise failures[0]
    if options.detailed_stats and count > 1:
        for number, worker in enumerate(workers):
            _report(f"{options.role} worker {number}", [worker.tally], options, elapsed)
    _report(options.role, [worker.tally for worker in workers], options, elapsed)


def _report(title: str, tallies: list[_Tally], options: argparse.Namespace, elapsed: float) -> None:
    seconds = [second for tally in tallies for second in tally.seconds]
    values = sum(tally.values for tally in tallies)
    size = values * options.value_length
    calling = sum(seconds) / len(tallies)  # of one thread, on average
    times = Summary.of(seconds).scaled(1e3)
    rate, overall = size / calling / 1e9, size / elapsed / 1e9
    print(
        f"{title}: {values} values, {size / 1e9:.3f} GB in {elapsed:.2f} s, of which {calling:.2f} s in the store\n"
        f"  throughput   {rate:.3f} GB/s in the store's calls, {overall:.3f} GB/s overall\n"
        f"  operations   {values / calling:.1f} values/s, {len(seconds) / calling:.1f} calls/s\n"
        f"  latency (ms) mean {times.mean:.3f}  p50 {times.p50:.3f}  p90 {times.p90:.3f}  p95 {times.p95:.3f}  "
        f"p99 {times.p99:.3f}  max {times.largest:.3f}",
        flush=True,
    )


def _plan(options: argparse.Namespace) -> str:
    return (
        f"{options.max_requests} values of {options.value_length} bytes, {options.batch_size} a call, "
        f"{options.num_workers} at once, master {options.master_server}"
    )


def _named(code: int) -> str:
    try:
        return f"{code} {ErrorCode(code).name}"
    except ValueError:
        return str(code)


def _put_advice(code: int, options: argparse.Namespace) -> str:
    if code == ErrorCode.NO_AVAILABLE_HANDLE:
        needed = options.max_requests * options.value_length / (1 << 30)
        return (
            f": the pool has no room left for it; all values together take {needed:.2f} GiB, so give a larger "
            "--global-segment-size, or fewer or shorter values"
        )
    return _get_advice(code)


def _get_advice(code: int) -> str:
    if code in (ErrorCode.RPC_FAIL, ErrorCode.RPC_TIMEOUT):
        return ": the master does not answer"
    if code == ErrorCode.OBJECT_NOT_FOUND:
        return ": it was evicted, or prefill has ended; the pool must hold all values at once"
    if code == ErrorCode.TRANSFER_FAIL:
        return ": the process that holds it cannot be reached"
    return ""
