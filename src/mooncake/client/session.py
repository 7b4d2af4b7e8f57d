"""The light half of setting a client up: its settings, its name, the master's address, its private segment server.

Nothing here imports numpy, so that the private server boots while this process imports it.
"""

import contextlib
import logging
import os
import random
import secrets
import socket
import time
from dataclasses import dataclass, field

import msgspec

from mooncake.client.adoption import adopt
from mooncake.client.checks import checksum_mode
from mooncake.client.child import PrivateServer
from mooncake.config_text import environment_truth, environment_whole
from mooncake.election.places import master_place
from mooncake.errors import ConfigError
from mooncake.rpc.client import Client
from mooncake.rpc.disk_messages import DiskSettings
from mooncake.rpc.messages import PROTOCOL, Codes, Hello, Ping
from mooncake.rpc.place import MasterPlace
from mooncake.rpc.serving_messages import Serve
from mooncake.security.tls_files import check_files
from mooncake.transfer.host import host_id
from mooncake.transfer.listening import join_host, listen_address, split_host
from mooncake.transfer.metadata.backends import is_peer_to_peer
from mooncake.version import __version__

logger = logging.getLogger("mooncake.client")

PROTOCOLS = ("tcp", "rdma", "shm", "rpc_only")
SMALLEST_SEGMENT = 1024
LARGEST_BUFFER = 1 << 40
LONGEST_LINGER = 7 * 86_400  # seconds


@dataclass
class ClientConfig:
    """What setup was told, and what the environment adds."""

    local_hostname: str
    metadata_server: str
    segment_size: int
    buffer_size: int
    protocol: str
    master: str
    force_tcp: bool = field(
        default_factory=lambda: os.environ.get("MC_FORCE_TCP", "").lower() in ("1", "true", "on", "yes")
    )
    control_limit: float = field(default_factory=lambda: environment_whole("MC_RPC_TIMEOUT_MS", 1000) / 1e3)
    transfer_limit: float = field(default_factory=lambda: float(max(5, environment_whole("MC_TRANSFER_TIMEOUT", 30))))
    min_port: int = field(default_factory=lambda: environment_whole("MC_STORE_CLIENT_MIN_PORT", 12300))
    max_port: int = field(default_factory=lambda: environment_whole("MC_STORE_CLIENT_MAX_PORT", 14300))
    retries: int = field(default_factory=lambda: environment_whole("MC_STORE_CLIENT_SETUP_RETRIES", 20))
    min_data_port: int = field(
        default_factory=lambda: environment_whole("MC_MIN_RPC_PORT", environment_whole("MC_MIN_PRC_PORT", 15000))
    )
    max_data_port: int = field(default_factory=lambda: environment_whole("MC_MAX_RPC_PORT", 17000))
    bind_address: str = field(default_factory=lambda: os.environ.get("MC_TCP_BIND_ADDRESS", ""))
    socket_dir: str = field(default_factory=lambda: os.environ.get("MC_SHM_SOCKET_DIR", ""))
    counts: bool = field(default_factory=lambda: environment_truth("MC_STORE_CLIENT_METRIC", True))  # metrics
    report_interval: int = field(  # seconds between two reports of them in the log, 0: none
        default_factory=lambda: environment_whole("MC_STORE_CLIENT_METRIC_INTERVAL", 0)
    )
    checksum: str = field(default_factory=checksum_mode)
    linger: int = field(default_factory=lambda: environment_whole("MOONCAKE_SEGMENT_LINGER_S", 0))  # seconds
    disk: DiskSettings | None = None  # the SSD tier of our segment server
    shares_engine: bool = False  # a transfer engine of ours has the same name
    tenant: str = "default"  # whose keys are named
    is_dummy: bool = False  # set up against a `mooncake_client`

    @property
    def metadata(self) -> str:
        """Address of the metadata service, "" if there is none."""
        return "" if is_peer_to_peer(self.metadata_server) else self.metadata_server

    def check(self) -> None:
        """Raise ConfigError, with one sentence, for what cannot work."""
        check_files()
        if not self.local_hostname:
            raise ConfigError(
                "local_hostname is empty; give the host name or address that other hosts reach this one by"
            )
        if not self.metadata_server.strip():
            raise ConfigError("metadata_server is empty; use 'P2PHANDSHAKE', which needs no metadata service")
        if self.protocol not in PROTOCOLS:
            raise ConfigError(f"protocol {self.protocol!r} is unknown; expected one of {', '.join(PROTOCOLS)}")
        if self.segment_size and self.segment_size < SMALLEST_SEGMENT:
            raise ConfigError(
                f"global_segment_size is {self.segment_size} bytes; expected 0 (contribute no memory) or at least "
                f"{SMALLEST_SEGMENT}"
            )
        if not 0 <= self.buffer_size <= LARGEST_BUFFER:
            raise ConfigError(f"local_buffer_size is {self.buffer_size} bytes; expected 0 to {LARGEST_BUFFER} (1 TB)")
        if not 0 <= self.linger <= LONGEST_LINGER:
            raise ConfigError(f"MOONCAKE_SEGMENT_LINGER_S is {self.linger}; expected 0 to {LONGEST_LINGER} (seconds)")
        self.place()

    def place(self) -> MasterPlace:
        """Where the master is.  Raises ConfigError."""
        try:
            return master_place(self.master)
        except ConfigError as error:
            raise ConfigError(f"master_server_addr: {error}") from None


class Session:
    """A greeted master, a name of our own, and the private server if we contribute memory (started, not awaited)."""

    def __init__(self, config: ClientConfig) -> None:
        config.check()
        self.config = config
        host, explicit = split_host(config.local_hostname)
        self._name_socket: socket.socket | None = None
        self.rpc: Client | None = None
        self.server: PrivateServer | None = None
        try:
            port = explicit or self._reserve_port()
            self.name = join_host(host, port)
            self.client_id = f"{secrets.randbits(64)}-{secrets.randbits(64)}"
            self.hello = Hello(PROTOCOL, __version__, "client", self.client_id, host_id(), tenant=config.tenant)
            self.rpc = Client(config.place(), self.hello, config.control_limit)
            self.rpc.call_first(Ping(), Codes)
            if config.metadata and not config.segment_size:
                self._refuse_taken_name()
            if config.segment_size:
                self.server = self._start_server(self._serve(host, config.segment_size))
        except BaseException:
            self.close()
            raise
        if config.protocol == "rdma":
            logger.info("protocol rdma: no RDMA transport is available here; shared memory and tcp are used instead")

    def close(self) -> None:
        if self.server is not None:
            self.server.close()
        if self._name_socket is not None:
            self._name_socket.close()
        if self.rpc is not None:
            self.rpc.close()

    def _start_server(self, wanted: Serve) -> PrivateServer:
        """One of our own, or, if such servers linger, one that an engine like us has left; its name is ours then."""
        adopted = adopt(wanted, self.hello) if wanted.linger_ms else None
        if adopted is None:
            return PrivateServer(wanted)
        if self._name_socket is not None and adopted.name != self.name:
            self._name_socket.close()
            self._name_socket = _hold(split_host(adopted.name)[1])
        self.name = adopted.name
        return adopted

    def _refuse_taken_name(self) -> None:
        """Nothing of ours can be reached, so nothing is published; yet the name must not be a living segment's.

        Raises NameTakenError, MetadataError if the service cannot be used.
        """
        from mooncake.transfer.metadata.entries import address_key
        from mooncake.transfer.metadata.publication import open_for_entries, refuse_if_alive

        with contextlib.closing(open_for_entries(self.config.metadata)) as backend:
            value = backend.get(address_key(self.name))
        if value is not None:
            refuse_if_alive(self.name, value)

    def _reserve_port(self) -> int:
        """A free port that makes our name unique on the host; held, never listened on."""
        config = self.config
        for attempt in range(config.retries):
            if attempt:
                time.sleep(0.1)
            port = random.randrange(config.min_port, max(config.max_port, config.min_port + 1))
            self._name_socket = _hold(port)
            if self._name_socket is not None:
                return port
        raise ConfigError(
            f"no free port from {config.min_port} to {config.max_port} in {config.retries} tries; widen "
            "MC_STORE_CLIENT_MIN_PORT..MC_STORE_CLIENT_MAX_PORT"
        )

    def another(self, size: int) -> Serve:
        """What a further segment of the same name needs.  It is not published: the name is."""
        host, _ = split_host(self.config.local_hostname)
        return msgspec.structs.replace(self._serve(host, size), metadata="", linger_ms=0)

    def in_file(self, path: str, start: int, size: int) -> Serve:
        """As `another`, of a segment in a file.  Values there are not written to disk once more."""
        return msgspec.structs.replace(self.another(size), path=path, start=start, disk=None)

    def _serve(self, host: str, size: int) -> Serve:
        config = self.config
        return Serve(
            segment=secrets.randbits(62) + 1,
            name=self.name,
            size=size,
            listen=config.bind_address or listen_address(host),
            announce=host,
            min_port=config.min_data_port,
            max_port=config.max_data_port,
            master=config.master,
            client=self.client_id,
            host=self.hello.host,
            protocol="tcp",
            socket_dir=config.socket_dir,
            metadata=config.metadata,
            endpoint=self.name if config.metadata or config.shares_engine else "",
            disk=config.disk,
            linger_ms=config.linger * 1000,
            identity=self._identity(size),
        )

    def _identity(self, size: int) -> str:
        """What an engine must have in common with the one before it to take its segment server over."""
        config = self.config
        of_both = (
            config.local_hostname, config.metadata_server, size, config.protocol, config.master, config.bind_address,
            config.min_data_port, config.max_data_port, config.shares_engine, config.disk, PROTOCOL, __version__,
        )  # fmt: skip
        return repr(of_both)


def _hold(port: int) -> socket.socket | None:
    """A socket that keeps others from the port; None if somebody has it."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.bind(("", port))
    except OSError:
        sock.close()
        return None
    return sock
