"""An engine's private segment server, started by the store client with a socket and a pidfd of the engine."""

import contextlib
import logging
import os
import signal
import socket
import sys

from mooncake.segment.private import serve_private


def run() -> None:
    """Serve until the engine stops us or is gone, then leave the process."""
    socket_fd, engine_pidfd = (int(argument) for argument in sys.argv[1:3])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C at a terminal is for the engine
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    with contextlib.suppress(OSError):  # not the core that the engine was pinned to
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    logging.basicConfig(level=logging.INFO, format="%(levelname).1s %(asctime)s %(name)s: %(message)s")
    serve_private(socket.socket(fileno=socket_fd), engine_pidfd)
    logging.shutdown()
    os._exit(0)  # threads are blocked in system calls that nobody will end


if __name__ == "__main__":
    run()
