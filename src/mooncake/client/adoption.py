"""Taking over the segment server that an engine like this one has left behind on this host, with the values in it."""

import logging
import os
import socket

import msgspec

from mooncake.client.child import PrivateServer
from mooncake.errors import StoreError
from mooncake.rpc import frame
from mooncake.rpc.client import Connection
from mooncake.rpc.messages import DECODERS, KINDS, Hello, Serving, encode
from mooncake.rpc.segment_messages import TakeOver
from mooncake.rpc.serving_messages import Serve
from mooncake.rpc.sockets import set_time_limit
from mooncake.transfer.file_memory import open_memory
from mooncake.transfer.memory import SegmentMemory
from mooncake.transfer.warm_sockets import connect, peer_of, waiting

logger = logging.getLogger("mooncake.client")

LIMIT = 1.0  # seconds: who is stopped meanwhile is left alone
_FAILED = (OSError, StoreError, ValueError, frame.FramingError, msgspec.MsgspecError)


class AdoptedServer(PrivateServer):
    """A server that another process, or an earlier store of this one, has started."""

    def __init__(self, channel: socket.socket, serving: Serving, memory: SegmentMemory) -> None:
        self._serving = serving
        self._memory = memory
        self._pid, _ = peer_of(channel)
        self._use(channel)

    def wait(self) -> tuple[Serving, SegmentMemory]:
        return self._serving, self._memory

    @property
    def pid(self) -> int:
        return self._pid

    @property
    def name(self) -> str:
        """What its segment is called."""
        return self._serving.info.name

    def ended(self) -> None:
        """It is no child of ours: nothing to wait for."""

    def kill(self) -> None:
        """Its channel's end says that nobody has it."""
        self._reap()

    def _reap(self) -> None:
        self._channel.close()


def adopt(config: Serve, hello: Hello) -> AdoptedServer | None:
    """The server of such a segment that has no engine, ours from now on; None if there is none, or others were
    quicker."""
    for address in waiting(config.socket_dir, config.identity):
        try:
            server = _take(address, config, hello)
        except _FAILED as error:
            logger.info("a segment server that waits for an engine could not be taken over: %s", error)
            continue
        logger.info("segment %s is taken over, with the values in it", server.name)
        return server
    return None


def _take(address: str, config: Serve, hello: Hello) -> AdoptedServer:
    channel = connect(address)
    try:
        set_time_limit(channel, LIMIT)
        Connection(channel).greet(hello)
        pidfd = os.pidfd_open(os.getpid())
        messages = _messages()
        try:
            request = frame.pack(KINDS[TakeOver], frame.REQUEST, 1, encode(TakeOver(config.identity, config.linger_ms)))
            socket.send_fds(channel, [request], [pidfd, messages])
        finally:
            os.close(pidfd)
            os.close(messages)
        data, descriptors, _, _ = socket.recv_fds(channel, 65536, 2)
        frames = frame.FrameReader().feed(data)
        if len(descriptors) != 2 or not frames or frames[0].flags & frame.FAILED:
            for descriptor in descriptors:
                os.close(descriptor)
            raise ValueError("another engine has it by now")
        memory = open_memory(descriptors[0], descriptors[1], config.memory, -1)
        serving = DECODERS[KINDS[Serving]].decode(frames[0].body)
        assert isinstance(serving, Serving)
        memory.table.check(serving.info.segment)
        return AdoptedServer(channel, serving, memory)
    except BaseException:
        channel.close()
        raise


def _messages() -> int:
    """A descriptor of where this process's messages for people go."""
    try:
        return os.dup(2)
    except OSError:
        return os.open(os.devnull, os.O_WRONLY)
