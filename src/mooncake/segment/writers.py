"""Who may be writing into a segment, and whether he still can.

A mapping cannot be taken back: a writer stopped in the middle of a copy goes on when it is resumed.  So the extents
of its open records stay out of use until it is known dead (pidfd of a same-host process) or its stream is closed (tcp).
"""

import contextlib
import itertools
import os
import select
import socket
import threading


class Writer:
    """A process that has mapped the segment, or a tcp stream that writes into it."""

    def __init__(self, number: int, pidfd: int = -1, stream: socket.socket | None = None) -> None:
        self.number = number
        self.pidfd = pidfd
        self.stream = stream

    def alive(self) -> bool:
        """Whether it could still write.  A stream counts until its thread has let go of it."""
        if self.stream is not None or self.pidfd < 0:
            return True
        poll = select.poll()  # (select() takes no descriptor above 1023)
        poll.register(self.pidfd, select.POLLIN)
        return not poll.poll(0)

    def stop(self) -> None:
        """Ask a stream to end; a process cannot be asked."""
        if self.stream is not None:
            with contextlib.suppress(OSError):
                self.stream.shutdown(socket.SHUT_RDWR)


class Writers:
    """The registry.  Numbers are never used again, so a record's writer is who it says or gone."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._writers: dict[int, Writer] = {}
        self._processes: dict[int, Writer] = {}  # by pid

    def process(self, pid: int) -> Writer | None:
        """The living process that is known by this pid, as seen from here."""
        writer = self._processes.get(pid)
        return writer if writer is not None and writer.alive() else None

    def add_process(self, pid: int) -> Writer:
        """A process of this host; pid 0: one of another pid namespace, of which only its socket tells whether it
        lives.  Raises OSError if it cannot be watched, ProcessLookupError if it has died already."""
        writer = self._add(Writer(next(self._numbers), pidfd=os.pidfd_open(pid) if pid > 0 else -1))
        if pid > 0:
            self._processes[pid] = writer
        return writer

    def add_pidfd(self, pidfd: int) -> Writer:
        return self._add(Writer(next(self._numbers), pidfd=pidfd))

    def add_stream(self, stream: socket.socket) -> Writer:
        return self._add(Writer(next(self._numbers), stream=stream))

    def remove(self, writer: Writer) -> None:
        """It is dead, or its stream is closed and nothing of it is under way."""
        with self._lock:
            self._writers.pop(writer.number, None)
            for pid, known in list(self._processes.items()) if writer.stream is None else ():
                if known is writer:
                    del self._processes[pid]
        if writer.pidfd >= 0:
            os.close(writer.pidfd)
            writer.pidfd = -1

    def get(self, number: int) -> Writer | None:
        with self._lock:
            return self._writers.get(number)

    def _add(self, writer: Writer) -> Writer:
        with self._lock:
            self._writers[writer.number] = writer
        return writer
