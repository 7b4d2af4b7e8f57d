"""setup_dummy: joining the pool that a `mooncake_client` of this host belongs to, knowing nothing but its address."""

import ctypes
import mmap
import secrets
from typing import TYPE_CHECKING, Self

from mooncake.errors import ConfigError, ErrorCode, MooncakeError, StoreError
from mooncake.store.member import INVALID, Member, logger
from mooncake.transfer.host import host_id
from mooncake.version import __version__

if TYPE_CHECKING:
    from mooncake.client.client import StoreClient
    from mooncake.rpc.task_messages import Introduction

_ALIGNED = 64  # bytes
FAILED = int(ErrorCode.INTERNAL_ERROR)


class MemoryPool:
    """Memory handed out front to back, and never taken back."""

    def __init__(self, size: int) -> None:
        self._block = mmap.mmap(-1, size, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS) if size else None
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._block)) if self._block is not None else 0
        self._left = size

    def allocate(self, size: int) -> int:
        """An address, 0 if there is no room."""
        taken = -(-size // _ALIGNED) * _ALIGNED
        if size <= 0 or taken > self._left or self._block is None:
            return 0
        self._left -= taken
        return self._address + len(self._block) - self._left - taken


class Dummy(Member):
    """The calls of a store that is set up against a `mooncake_client`."""

    def __init__(self) -> None:
        super().__init__()
        self._pool = MemoryPool(0)

    def setup_dummy(self, mem_pool_size: int, local_buffer_size: int, server_address: str) -> int:
        """Join the pool of the `mooncake_client` at "host:port" (50052 by default) of this host; 0, or -1 and why in
        the log.  `mem_pool_size`: bytes that alloc_from_mem_pool may hand out."""
        with self._lock:
            self._leave()
            try:
                pool = MemoryPool(mem_pool_size)
                self._client = _join(_ask(server_address), local_buffer_size)
            except (MooncakeError, OSError, ValueError, OverflowError) as error:
                logger.error("setup_dummy failed: %s", error)
                return FAILED
            self._pool, self._buffer_size = pool, local_buffer_size
        return 0

    def init_all(self, protocol: str, device_name: str, mount_segment_size: int) -> int:
        """Set up as the configuration file or the environment says (MooncakeConfig.load_from_env), but for these three:
        0, or a negative code; INVALID_PARAMS if neither says enough."""
        from mooncake.mooncake_config import MooncakeConfig

        try:
            config = MooncakeConfig.load_from_env()
        except (ValueError, OSError) as error:
            logger.error("init_all: %s", error)
            return INVALID
        return self.setup(
            config.local_hostname,
            config.metadata_server,
            mount_segment_size,
            config.local_buffer_size,
            protocol,
            device_name,
            config.master_server_address,
            tenant_id=config.tenant_id,
        )

    def _get_pyclient_capsule(self) -> Self:
        """What BufferPool and EngramStore ask a wrapper for: the store itself."""
        return self

    def alloc_from_mem_pool(self, size: int) -> int:
        """Address of `size` bytes of the memory that setup_dummy was asked for; 0 if they are not there."""
        with self._lock:
            return self._pool.allocate(size)


def _ask(address: str) -> "Introduction":
    from msgspec import MsgspecError

    from mooncake.rpc.client import Connection
    from mooncake.rpc.frame import FramingError
    from mooncake.rpc.messages import PROTOCOL, Hello
    from mooncake.rpc.place import parse_address
    from mooncake.rpc.sockets import connect, set_time_limit
    from mooncake.rpc.task_messages import Introduce, Introduction

    host, port = parse_address(address)
    try:
        connection = Connection(connect(host, port, 1.0))
    except OSError as error:
        raise ConfigError(
            f"no mooncake_client answers at {address} ({error.strerror or error}); start one there, or give its --port"
        ) from None
    try:
        set_time_limit(connection.sock, 1.0)
        connection.greet(Hello(PROTOCOL, __version__, "client", f"{secrets.randbits(64)}-0", host_id()))
        answer = connection.call(Introduce())
    except (OSError, StoreError, FramingError, MsgspecError) as error:
        raise ConfigError(f"what listens at {address} is no mooncake_client of this version ({error})") from None
    finally:
        connection.close()
    assert isinstance(answer, Introduction)
    return answer


def _join(introduction: "Introduction", buffer_size: int) -> "StoreClient":
    from mooncake.client.session import ClientConfig, Session

    config = ClientConfig(
        local_hostname=introduction.host,
        metadata_server=introduction.metadata,
        segment_size=0,
        buffer_size=buffer_size,
        protocol=introduction.protocol,
        master=introduction.master,
        tenant=introduction.tenant,
        is_dummy=True,
    )
    session = Session(config)
    try:
        from mooncake.client.client import StoreClient

        return StoreClient(session)
    except BaseException:
        session.close()
        raise
