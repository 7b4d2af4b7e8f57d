"""`transfer_engine_bench`: how fast blocks move between the transfer engines of two processes.

A target registers memory and waits; initiators move batches of blocks from or to it with many threads, and report the
rate.
"""

import argparse
import mmap
import random
import signal
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING

from mooncake.cli.arguments import Parser, whole
from mooncake.cli.gflags import size, spelled, truth
from mooncake.errors import ConfigError
from mooncake.installed_once import refuse_if_cpp_installed
from mooncake.transfer.metadata.backends import is_peer_to_peer
from mooncake.version import __version__

if TYPE_CHECKING:
    from mooncake.engine import TransferEngine

UNITS = {
    "GB": 1e9, "GiB": 1 << 30, "Gb": 1e9 / 8,
    "MB": 1e6, "MiB": 1 << 20, "Mb": 1e6 / 8,
    "KB": 1e3, "KiB": 1 << 10, "Kb": 1e3 / 8,
}  # fmt: skip


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="transfer_engine_bench",
        description="Move blocks between two transfer engines and report the rate.",
    )
    add = parser.add_argument
    add(
        "--mode", choices=["initiator", "target"], default="initiator", help="target: lend memory (default %(default)s)"
    )
    add("--operation", choices=["read", "write"], default="read", help="which way bytes go (default %(default)s)")
    add("--segment_id", default="", help="the target's session or name, as it prints it")
    add("--local_server_name", default=socket.gethostname(), help="name or address of this host (default %(default)s)")
    add(
        "--metadata_server",
        default="P2PHANDSHAKE",
        help="http://HOST:PORT/metadata, etcd://HOST:PORT or redis://HOST:PORT; P2PHANDSHAKE: none (default)",
    )
    add("--protocol", default="tcp", help="towards other hosts; on this one memory is copied straight")
    add("--device_name", default="", help="RDMA devices; unused with tcp")
    add("--nic_priority_matrix", default="", help="not supported by this version")
    add("--buffer_size", type=size, default="1GiB", help="registered memory (default %(default)s)")
    add("--batch_size", type=whole, default=128, help="blocks a call (default %(default)s)")
    add("--block_size", type=size, default="65536", help="bytes a block (default %(default)s)")
    add("--duration", type=float, default=10, help="seconds (default %(default)s)")
    add("--threads", type=whole, default=12, help="threads that call (default %(default)s)")
    add("--auto_discovery", type=truth, nargs="?", const=True, default=False, help="accepted: devices are found anyway")
    add("--report_unit", choices=list(UNITS), default="GB", help="per second (default %(default)s)")
    add("--report_precision", type=whole, default=2, help="digits of the rate (default %(default)s)")
    add("--backend", choices=["classic", "tent"], default="classic", help="only classic is supported by this version")
    add("--version", action="version", version=f"transfer_engine_bench version {__version__}")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    try:
        refuse_if_cpp_installed()
    except ImportError as error:
        print(f"transfer_engine_bench: {error}", file=sys.stderr)
        return 1
    parser = _parser()
    options = parser.parse_args(spelled(parser, sys.argv[1:] if arguments is None else arguments))
    try:
        _check(options)
        engine = _engine(options)
        buffer = _register(engine, options.buffer_size)
        return _lend(engine, options) if options.mode == "target" else _measure(engine, buffer, options)
    except ConfigError as error:
        print(f"transfer_engine_bench: {error}", file=sys.stderr)
        return 1


def _check(options: argparse.Namespace) -> None:
    if options.backend != "classic":
        raise ConfigError("--backend=tent is not supported by this version; use classic")
    if options.nic_priority_matrix:
        raise ConfigError("--nic_priority_matrix is not supported by this version; leave it out")
    for name in ("batch_size", "block_size", "threads", "duration", "buffer_size"):
        if getattr(options, name) <= 0:
            raise ConfigError(f"--{name} is {getattr(options, name)}; expected a positive number")
    if options.mode == "initiator":
        if not options.segment_id:
            raise ConfigError("--segment_id is missing; expected the target's host:port, which the target prints")
        needed = options.batch_size * options.block_size * options.threads
        if needed > options.buffer_size:
            raise ConfigError(
                f"--buffer_size is {options.buffer_size}; {options.threads} threads with {options.batch_size} blocks "
                f"of {options.block_size} bytes need {needed}"
            )


def _engine(options: argparse.Namespace) -> "TransferEngine":
    import logging

    from mooncake.engine import TransferEngine

    logging.basicConfig(level=logging.ERROR, format="%(levelname).1s %(name)s: %(message)s")
    engine = TransferEngine()
    if engine.initialize(options.local_server_name, options.metadata_server, options.protocol, options.device_name):
        raise ConfigError("the engine could not be initialized, see above")
    return engine


def _register(engine: "TransferEngine", length: int) -> int:
    """The address of `length` bytes of new, touched, registered memory; it stays until the process ends."""
    import numpy as np

    room = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        room.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(room, np.uint8)
    memory[:: mmap.PAGESIZE] = 1
    _kept.append(memory)
    address = int(memory.ctypes.data)
    if engine.register_memory(address, length):
        raise ConfigError(f"{length} bytes could not be registered, see above")
    return address


_kept: list[object] = []


def _lend(engine: "TransferEngine", options: argparse.Namespace) -> int:
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    name = options.local_server_name
    if is_peer_to_peer(options.metadata_server):
        name = f"{name.rpartition(':')[0] or name}:{engine.get_rpc_port()}"
    print(f"target is ready; run the initiator with --segment_id={name}", flush=True)
    stop.wait()
    return 0


def _measure(engine: "TransferEngine", buffer: int, options: argparse.Namespace) -> int:
    target, block, count = options.segment_id, options.block_size, options.batch_size
    peer = engine.get_first_buffer_address(target)
    if not peer:
        raise ConfigError(f"{target} cannot be reached, or has registered no memory")
    move = engine.batch_transfer_sync_read if options.operation == "read" else engine.batch_transfer_sync_write
    batches = [0] * options.threads
    failed = threading.Event()
    begin = time.monotonic()

    def run(thread: int) -> None:
        places = random.Random(thread).sample(range(count), count)
        offsets = [(thread * count + i) * block for i in range(count)]
        remote = [peer + (thread * count + i) * block for i in places]
        local, lengths = [buffer + offset for offset in offsets], [block] * count
        while time.monotonic() - begin < options.duration and not failed.is_set():
            if move(target, local, remote, lengths):
                failed.set()
                return
            batches[thread] += 1

    threads = [threading.Thread(target=run, args=(i,)) for i in range(options.threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took = time.monotonic() - begin
    if failed.is_set():
        raise ConfigError("a transfer failed, see above")
    rate = sum(batches) * count * block / took / UNITS[options.report_unit]
    print(
        f"Test completed: duration {took:.2f}, batch count {sum(batches)}, "
        f"throughput {rate:.{options.report_precision}f} {options.report_unit}/s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
