"""Starting and stopping an engine's private segment server.

Exec of the same interpreter, never a fork: the engine may hold CUDA, be daemonic, or be about to fork.  The child's
life hangs on a pidfd of this process, not on a parent-death signal (which fires when the starting *thread* ends) nor
on a pipe (which a grandchild may keep open).
"""

import contextlib
import os
import socket
import subprocess
import sys
import threading

from mooncake.errors import ConfigError, MooncakeError
from mooncake.rpc import frame
from mooncake.rpc.client import Connection
from mooncake.rpc.message import Message
from mooncake.rpc.messages import DECODERS, KINDS, Failure, Serving, encode
from mooncake.rpc.segment_messages import Family, Figures, FiguresQuery, LeaveDisk
from mooncake.rpc.serving_messages import Serve, Stop
from mooncake.rpc.sockets import set_time_limit
from mooncake.transfer.file_memory import open_memory
from mooncake.transfer.memory import SegmentMemory

START_LIMIT = 10.0  # seconds
STOP_LIMIT = 2.0
FIGURES_LIMIT = 0.5

# The child must find this very package, wherever it lies, without its folder staying ahead of the standard library.
_PARENT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_BOOT = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); import mooncake.segment.__main__ as m; sys.path.pop(0); m.run()"
)


class PrivateServer:
    """A running private segment server, and this process's mapping of its segment."""

    def __init__(self, config: Serve) -> None:
        """Start it.  `wait` must follow."""
        self._config = config
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        pidfd = os.pidfd_open(os.getpid())
        try:
            os.set_inheritable(pidfd, True)
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, _PARENT, str(there.fileno()), str(pidfd)],
                pass_fds=(there.fileno(), pidfd),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                cwd="/",
            )
        except BaseException:
            here.close()
            raise
        finally:
            there.close()
            os.close(pidfd)
        self._use(here)
        here.sendall(frame.pack(KINDS[Serve], frame.REQUEST, 1, encode(config)))

    def _use(self, channel: socket.socket) -> None:
        self._channel = channel
        self._connection = Connection(channel)
        self._turn = threading.Lock()  # of the channel

    def wait(self) -> tuple[Serving, SegmentMemory]:
        """Until it is mounted.  Raises ConfigError with the reason if it cannot serve."""
        set_time_limit(self._channel, START_LIMIT)
        try:
            data, descriptors, _, _ = socket.recv_fds(self._channel, 65536, 2)
        except BlockingIOError:
            data, descriptors = b"", []
        frames = frame.FrameReader().feed(data)
        if not frames or frames[0].flags & frame.FAILED:
            self.kill()
            if not frames:
                raise ConfigError("the private segment server did not start; its messages are on standard error")
            raise ConfigError(DECODERS[KINDS[Failure]].decode(frames[0].body).text)  # type: ignore[attr-defined]
        serving = DECODERS[KINDS[Serving]].decode(frames[0].body)
        assert isinstance(serving, Serving)
        config = self._config
        start = config.start if config.path else -1
        return serving, open_memory(descriptors[0], descriptors[1], config.memory, start)

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        """Unmount at the master and end; returns once the master knows.  One that lingers stays as it is, for the next
        engine.  Again: nothing."""
        self._ask(Stop(), STOP_LIMIT)
        self._reap()

    def retire(self, grace: float) -> None:
        """As `close`, in `grace` seconds: nothing new comes in meanwhile, what is there stays readable.  `ended` waits
        for it."""
        self._ask(Stop(int(grace * 1e3)), STOP_LIMIT)

    def ended(self) -> None:
        """Returns when the process is gone."""
        self._process.wait()

    def leave_disk(self) -> None:
        """Nothing more is written to its disk; returns once the master tells nobody of what is there."""
        self._ask(LeaveDisk(), STOP_LIMIT)

    def figures(self) -> list[Family]:
        """Metrics of the server; none if it does not answer."""
        answer = self._ask(FiguresQuery(), FIGURES_LIMIT)
        return answer.families if isinstance(answer, Figures) else []

    def _ask(self, message: Message, limit: float) -> Message | None:
        """The answer; None if there is none, now or any more."""
        with self._turn:
            if self._channel.fileno() < 0:
                return None
            set_time_limit(self._channel, limit)
            try:
                return self._connection.call(message)
            except (OSError, frame.FramingError, MooncakeError):
                return None

    def kill(self) -> None:
        with contextlib.suppress(OSError):
            self._process.kill()
        self._reap()

    def _reap(self) -> None:
        """No zombie stays; a child that takes long to give its memory back is waited for elsewhere."""
        self._channel.close()
        try:
            self._process.wait(0.05)
        except subprocess.TimeoutExpired:
            threading.Thread(target=self._process.wait, name="mooncake-reaper", daemon=True).start()
