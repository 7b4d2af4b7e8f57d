"""TransferEngine: names, arguments and results of the C++ engine (spec: drop-in behaviour 2) over transfer.engine."""

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mooncake.engine.types import InnerTransferEngine, TransferNotify
from mooncake.engine.types import TransferOpcode as Opcode
from mooncake.errors import MooncakeError

if TYPE_CHECKING:
    from mooncake.engine.managed import Block, ManagedPool
    from mooncake.transfer.engine import Engine

logger = logging.getLogger("mooncake.engine")

OK, FAILED = 0, -1


class TransferEngine:
    """Moves bytes between this process's memory and the registered memory of other engines.  Thread-safe, blocking.

    A peer is named by its session, "host:port" of its `initialize` and `get_rpc_port`; with a metadata service by the
    `local_hostname` that it was initialized with.
    """

    TransferOpcode = Opcode

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._managed: ManagedPool | None = None
        self._large: dict[int, Block] = {}
        self._lock = threading.RLock()

    # -- set-up

    def initialize(self, local_hostname: str, metadata_server: str, protocol: str, device_name: str | None, /) -> int:
        """Listen as "local_hostname:<a port>" (see get_rpc_port); publish that as `local_hostname` at the server,
        unless it is "P2PHANDSHAKE".  0; -1 if that cannot be, why is in the log."""
        from mooncake.engine.settings import read_settings

        try:
            settings = read_settings(local_hostname, metadata_server, protocol)
            from mooncake.transfer.engine import Engine

            engine = Engine(settings)
        except (MooncakeError, OSError) as error:
            logger.error("initialize failed: %s", error)
            return FAILED
        if protocol.lower() != "tcp" or device_name:
            logger.info(
                "protocol %s: memory of the same host is copied straight, other hosts are reached by tcp", protocol
            )
        with self._lock:
            former, self._engine = self._engine, engine
            self._managed, self._large = None, {}
        if former is not None:
            former.close()
        return OK

    def initialize_ext(
        self, local_hostname: str, metadata_conn: str, protocol: str, device_name: str | None, metadata_type: str, /
    ) -> int:
        """As `initialize`, with the metadata service's kind and address apart."""
        kind = metadata_type.upper()
        if kind in ("P2PHANDSHAKE", "") or metadata_conn.upper() == "P2PHANDSHAKE":
            return self.initialize(local_hostname, "P2PHANDSHAKE", protocol, device_name)
        address = metadata_conn if "://" in metadata_conn else f"{metadata_type}://{metadata_conn}"
        return self.initialize(local_hostname, address, protocol, device_name)

    def get_rpc_port(self) -> int:
        """The port of our session; 0 before `initialize`."""
        engine = self._ready("get_rpc_port")
        return engine.port if engine is not None else 0

    def get_engine(self) -> InnerTransferEngine:
        return InnerTransferEngine(self)

    def get_engine_ptr(self) -> int:
        """A number that names this engine within the process."""
        return id(self)

    def get_local_topology(self, device_name: str | None = None) -> str:
        """JSON text: location → [preferred network devices, other ones]."""
        from mooncake.engine.topology import local_topology

        try:
            return local_topology(device_name or "", os.environ.get("MC_CUSTOM_TOPO_JSON", ""))
        except OSError as error:
            logger.error("get_local_topology: MC_CUSTOM_TOPO_JSON cannot be read: %s", error)
            return local_topology(device_name or "")

    def warmup_efa_segment(self, segment_name: str) -> int:
        """0: there is nothing to warm up."""
        return OK

    def transfer_stats(self) -> dict[str, int]:
        """Bytes that our calls moved by transport ("cma", "tcp", and "cuda" once it was used), and "cma_refused": how
        many peers of this host had to be reached by tcp because cma is not permitted."""
        engine = self._ready("transfer_stats")
        return engine.stats if engine is not None else {}

    # -- registered memory

    def register_memory(self, buffer_addr: int, capacity: int, location: str = "*") -> int:
        """Let peers read and write this range.  0; -7 if it overlaps a registered one; -1 if it is no memory."""
        return self.batch_register_memory([buffer_addr], [capacity], location)

    def unregister_memory(self, address: int, /) -> int:
        """Undo register_memory of exactly this address.  0 once no peer can touch it any more; -3 if unknown."""
        return self.batch_unregister_memory([address])

    def batch_register_memory(
        self, buffer_addresses: Sequence[int], capacities: Sequence[int], location: str = "*"
    ) -> int:
        """Register all of the ranges, or none."""
        engine = self._ready("batch_register_memory")
        if engine is None:
            return FAILED
        code, reason = engine.regions.register(buffer_addresses, capacities)
        if code:
            logger.error("register_memory: %s", reason)
        return code

    def batch_unregister_memory(self, addresses: Sequence[int], /) -> int:
        """Unregister those that are known; -3 if one is not.  -4: a stopped process may still finish a copy."""
        engine = self._ready("batch_unregister_memory")
        if engine is None:
            return FAILED
        code, reason = engine.regions.unregister(addresses)
        if code:
            logger.error("unregister_memory: %s", reason)
        return code

    # -- transfers

    def transfer_sync_write(
        self, target_hostname: str, buffer: int, peer_buffer_address: int, length: int, transport_hint: str = ""
    ) -> int:
        """Write `length` bytes at `buffer` to the peer's registered memory.  0 or -1."""
        return self._move(target_hostname, Opcode.Write, [buffer], [peer_buffer_address], [length])

    def transfer_sync_read(
        self, target_hostname: str, buffer: int, peer_buffer_address: int, length: int, transport_hint: str = ""
    ) -> int:
        """Read `length` bytes of the peer's registered memory to `buffer`.  0 or -1."""
        return self._move(target_hostname, Opcode.Read, [buffer], [peer_buffer_address], [length])

    def batch_transfer_sync_write(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        transport_hint: str = "",
    ) -> int:
        """Write many ranges; 0 if all are there, else -1."""
        return self._move(target_hostname, Opcode.Write, buffers, peer_buffer_addresses, lengths)

    def batch_transfer_sync_read(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        transport_hint: str = "",
    ) -> int:
        """Read many ranges; 0 if all are there, else -1."""
        return self._move(target_hostname, Opcode.Read, buffers, peer_buffer_addresses, lengths)

    def transfer_sync(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        opcode: Opcode,
        notify: TransferNotify | None = None,
        transport_hint: str = "",
    ) -> int:
        """Read or write; the peer finds `notify` in its get_notifies once the bytes are there."""
        return self._move(target_hostname, opcode, [buffer], [peer_buffer_address], [length], notify)

    def batch_transfer_sync(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        opcode: Opcode,
        notify: TransferNotify | None = None,
        transport_hint: str = "",
    ) -> int:
        """As transfer_sync, of many ranges."""
        return self._move(target_hostname, opcode, buffers, peer_buffer_addresses, lengths, notify)

    def batch_transfer_async(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        opcode: Opcode,
        transport_hint: str = "",
    ) -> int:
        """Begin; a batch id for get_batch_transfer_status, or 0 if it cannot begin."""
        engine = self._ready("batch_transfer_async")
        if engine is None:
            return 0
        try:
            return engine.submit(target_hostname, opcode is Opcode.Write, buffers, peer_buffer_addresses, lengths)
        except MooncakeError as error:
            logger.error("a transfer to or from %s cannot begin: %s", target_hostname, error)
            return 0

    def batch_transfer_async_write(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        transport_hint: str = "",
    ) -> int:
        """As batch_transfer_async."""
        return self.batch_transfer_async(target_hostname, buffers, peer_buffer_addresses, lengths, Opcode.Write)

    def batch_transfer_async_read(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        transport_hint: str = "",
    ) -> int:
        """As batch_transfer_async."""
        return self.batch_transfer_async(target_hostname, buffers, peer_buffer_addresses, lengths, Opcode.Read)

    def get_batch_transfer_status(self, batch_ids: Sequence[int], /) -> int:
        """Wait for all of them; 0 if all succeeded, else -1.  Their ids are free then."""
        engine = self._ready("get_batch_transfer_status")
        return engine.wait(batch_ids) if engine is not None else FAILED

    def transfer_submit_write(
        self, target_hostname: str, buffer: int, peer_buffer_address: int, length: int, transport_hint: str = ""
    ) -> int:
        """Begin a write; an id for transfer_check_status, or 0."""
        return self.batch_transfer_async_write(target_hostname, [buffer], [peer_buffer_address], [length])

    def transfer_check_status(self, batch_id: int, /) -> int:
        """1 done, 0 under way, -1 failed, -2 timed out.  Once it is not 0 the id is free."""
        engine = self._ready("transfer_check_status")
        return engine.status(batch_id) if engine is not None else FAILED

    # -- peers

    def get_notifies(self) -> list[TransferNotify]:
        """What peers have sent since the last time."""
        engine = self._ready("get_notifies")
        if engine is None:
            return []
        return [TransferNotify(message.name, message.text) for message in engine.notifications()]

    def send_probe(self, peer_server_name: str) -> int:
        """0 if the peer answers; -102 if it refuses or is silent, -101 if its host does not resolve, -200 if the
        metadata service does not know it or cannot be asked, else -1."""
        engine = self._ready("send_probe")
        try:
            return engine.probe(peer_server_name) if engine is not None else FAILED
        except MooncakeError as error:
            logger.error("send_probe: %s", error)
            return FAILED

    def get_first_buffer_address(self, segment_name: str, /) -> int:
        """Address of the memory that the peer registered first; 0 if there is none, or no such peer."""
        engine = self._ready("get_first_buffer_address")
        try:
            return engine.first_buffer(segment_name) if engine is not None else 0
        except MooncakeError as error:
            logger.error("get_first_buffer_address: %s", error)
            return 0

    # -- managed buffers

    def allocate_managed_buffer(self, length: int, /) -> int:
        """Address of registered memory of `length` bytes or more; 0 if there is none."""
        from mooncake.engine.managed import LARGEST, Block, ManagedPool

        engine = self._ready("allocate_managed_buffer")
        if engine is None or length <= 0:
            return 0
        try:
            with self._lock:
                if length > LARGEST:
                    block = Block(length)
                    if self.register_memory(block.address, length):
                        return 0
                    self._large[block.address] = block
                    return block.address
                if self._managed is None:
                    pool = ManagedPool()
                    if self.register_memory(pool.block.address, pool.block.size):
                        return 0
                    self._managed = pool
                return self._managed.allocate(length)
        except OSError as error:
            logger.error("allocate_managed_buffer: no memory for %d bytes (%s)", length, error.strerror)
            return 0

    def free_managed_buffer(self, address: int, length: int, /) -> int:
        """0; -1 if it was not lent out."""
        with self._lock:
            if self._managed is not None and self._managed.free(address):
                return OK
            if address in self._large:
                code = self.unregister_memory(address)
                del self._large[address]
                return code
        logger.error("free_managed_buffer: %#x is not a managed buffer", address)
        return FAILED

    def write_bytes_to_buffer(self, address: int, data: bytes | str, length: int, /) -> int:
        """Copy the first `length` bytes of `data` to any address of this process.  0, or -1 if it is not mapped."""
        from mooncake.transfer.process_memory import write_at

        raw = data.encode() if isinstance(data, str) else data
        if not 0 <= length <= len(raw):
            logger.error("write_bytes_to_buffer: %d bytes are asked for, %d are given", length, len(raw))
            return FAILED
        try:
            if length:
                write_at(address, raw[:length])
        except MooncakeError as error:
            logger.error("write_bytes_to_buffer: %s", error)
            return FAILED
        return OK

    def read_bytes_from_buffer(self, address: int, length: int, /) -> bytes:
        """`length` bytes at any address of this process.  Raises ValueError if they are not mapped."""
        from mooncake.transfer.process_memory import read_at

        if length <= 0:
            return b""
        try:
            return read_at(address, length)
        except MooncakeError as error:
            raise ValueError(f"read_bytes_from_buffer: {error}") from None

    # -- inside

    def _move(
        self,
        target: str,
        opcode: Opcode,
        buffers: Sequence[int],
        addresses: Sequence[int],
        lengths: Sequence[int],
        notify: TransferNotify | None = None,
    ) -> int:
        engine = self._ready("a transfer")
        if engine is None:
            return FAILED
        told = (notify.name, notify.msg) if notify is not None else None
        try:
            engine.move(target, opcode is Opcode.Write, buffers, addresses, lengths, told)
        except MooncakeError as error:
            logger.error("a transfer to or from %s failed: %s", target, error)
            return FAILED
        return OK

    def _ready(self, what: str) -> "Engine | None":
        engine = self._engine
        if engine is None:
            logger.error("%s: the engine is not initialized", what)
            return None
        if engine.pid != os.getpid():
            raise RuntimeError(
                f"this TransferEngine was initialized in process {engine.pid} and is not usable in its forked child "
                f"{os.getpid()}; create and initialize a new one here"
            )
        return engine

    def _leave(self) -> None:
        with self._lock:
            engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def __del__(self) -> None:
        if not sys.is_finalizing():
            with contextlib.suppress(Exception):
                self._leave()
