"""Our own entries in a metadata service: who has a name, kept there whatever happens to the service, and taken back at
the end.

The holder of a name is whoever its entry says, as long as that process answers with the entry's instance number.  An
entry whose process does not (it died, its port is another's by now) may be replaced; a living holder is left alone: the
second process of a name cannot publish itself.  So two processes never write over each other in turns.
"""

import atexit
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from mooncake.config_text import environment_whole
from mooncake.errors import MetadataError, NameTakenError, StoreError
from mooncake.rpc import frame
from mooncake.rpc.client import Connection
from mooncake.rpc.messages import PROTOCOL, Hello
from mooncake.rpc.sockets import connect, set_time_limit
from mooncake.transfer.host import host_id
from mooncake.transfer.metadata.backends import open_backend
from mooncake.transfer.metadata.base import MetadataBackend
from mooncake.transfer.metadata.entries import (
    Address,
    address_key,
    decode_address,
    encode_address,
    encode_memory,
    memory_key,
)
from mooncake.transfer.metadata.limits import call_within
from mooncake.version import __version__

logger = logging.getLogger("mooncake.metadata")

PERIOD = 3  # seconds between two looks at our entries
MEMORY_PERIODS = 3  # between two looks at the entry of our memory, which is only for show
RETRY = 1.0  # seconds, while the service is out of reach
SHORTEST_TTL = 30  # seconds that an entry outlives its process, at least; ten periods if that is more
GREETING_LIMIT = 1.0  # seconds that connecting to a holder, and its answer, may take
HOLDER_LIMIT = 3.0  # seconds for all of it, the look-up of its host among them
CLOSE_LIMIT = 2.0
_ATTEMPTS = 3


def refresh_period() -> int:
    """Seconds.  Raises ConfigError."""
    return max(1, environment_whole("MC_TE_METADATA_REFRESH_INTERVAL_SECONDS", PERIOD))


def open_for_entries(text: str) -> MetadataBackend:
    """The back end at an address, its entries living some periods long.  Raises ConfigError."""
    return open_backend(text, max(SHORTEST_TTL, 10 * refresh_period()))


class Publication:
    """`name` stands for `address` until `close`.  `buffers` says what memory is registered now."""

    def __init__(
        self,
        backend: MetadataBackend,
        name: str,
        address: Address,
        buffers: Callable[[], Sequence[tuple[int, int]]],
    ) -> None:
        """Publish.  Our port must answer already.  Raises MetadataError: the service cannot be used, or a living
        process has the name."""
        self._backend = backend
        self._name = name
        self._address = address
        self._buffers = buffers
        self._key, self._value = address_key(name), encode_address(address)
        self._memory_key, self._memory = memory_key(name), b""
        self._described = 0.0  # when that was last written or renewed
        self._since = time.time()
        self._period = refresh_period()
        self._pid = os.getpid()
        self._trouble = ""
        self._stopping = threading.Event()
        claim(backend, name, self._value)
        self._describe()
        self._thread = threading.Thread(target=self._keep, name="mooncake-engine-metadata", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def close(self) -> None:
        """Take our entries back, if they still are ours.  Returns within CLOSE_LIMIT; a service that is out of reach
        then forgets them by itself."""
        atexit.unregister(self.close)
        if os.getpid() == self._pid:
            self._stopping.set()
            if threading.current_thread() is not self._thread:  # where the garbage collector may close us
                self._thread.join(CLOSE_LIMIT)

    # -- the thread

    def _keep(self) -> None:
        while not self._stopping.wait(self._pause()):
            self._look()
        if not self._trouble:
            try:
                self._backend.remove(self._memory_key, self._memory)
                self._backend.remove(self._key, self._value)
            except MetadataError as error:
                logger.warning("%s stays published: %s", self._name, error)
        self._backend.close()

    def _pause(self) -> float:
        """Until the next look; never two processes in step."""
        return (RETRY if self._trouble else self._period) * random.uniform(0.8, 1.2)

    def _look(self) -> None:
        """Once: what is missing is written again."""
        try:
            if not self._backend.renew(self._key, self._value):
                claim(self._backend, self._name, self._value)
                self._memory = b""
                logger.info("%s is published again", self._name)
            self._describe()
        except MetadataError as error:
            if not self._trouble:
                logger.warning("%s cannot be kept published for now: %s", self._name, error)
            self._trouble = str(error)
        else:
            if self._trouble:
                logger.info("the metadata server answers again")
            self._trouble = ""

    def _describe(self) -> None:
        """What our memory is, for those who look."""
        memory = encode_memory(self._name, self._address, self._buffers(), self._since)
        now = time.monotonic()
        if memory == self._memory and now < self._described + MEMORY_PERIODS * self._period:
            return
        if memory != self._memory or not self._backend.renew(self._memory_key, memory):
            self._backend.put(self._memory_key, memory)
        self._memory, self._described = memory, now


def claim(backend: MetadataBackend, name: str, value: bytes) -> None:
    """Make `value` the address of `name`.  Raises NameTakenError if a living process has it, MetadataError."""
    key = address_key(name)
    for _ in range(_ATTEMPTS):
        former = backend.get(key)
        if former == value:
            return
        if former is not None:
            refuse_if_alive(name, former)
        if backend.replace(key, former, value):
            return
    raise MetadataError(f"others keep publishing {name!r} at the same time")


def refuse_if_alive(name: str, value: bytes) -> None:
    """Raise NameTakenError if the process that an entry of `name` tells of is alive."""
    try:
        holder = decode_address(name, value)
    except MetadataError as error:
        logger.warning("%s; it is replaced", error)
        return
    try:
        alive = call_within(HOLDER_LIMIT, lambda: _answers(holder))
    except TimeoutError:
        alive = False
    if alive:
        raise NameTakenError(
            f"{name!r} is the name of a living process at {holder.text}; give this one another host:port as its name"
        )


def _answers(holder: Address) -> bool:
    """Whether the process that published `holder` is there now."""
    hello = Hello(PROTOCOL, __version__, "engine", "", host_id())
    try:
        connection = Connection(connect(holder.host, holder.port, GREETING_LIMIT))
    except OSError:
        return False
    try:
        set_time_limit(connection.sock, GREETING_LIMIT)
        welcome = connection.greet(hello)
    except (OSError, StoreError, frame.FramingError, msgspec.MsgspecError):
        return False
    finally:
        connection.close()
    return holder.instance in (0, welcome.instance)
