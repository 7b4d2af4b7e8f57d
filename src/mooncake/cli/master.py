"""`mooncake_master`: reads its settings, serves RPC first, then HTTP, until SIGINT or SIGTERM.

The RPC port answers before the HTTP libraries are imported; they are imported by a thread, so that the serving loop
goes on.  The HTTP ports are bound (not yet answered) from the start: a port in use ends the start at once, and early
requests wait in the backlog instead of being refused.
"""

import asyncio
import errno
import fcntl
import gc
import logging
import os
import signal
import socket
import struct
import sys
from collections.abc import Awaitable, Mapping
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

import uvloop

from mooncake.config_text import without_password
from mooncake.errors import ConfigError
from mooncake.installed_once import refuse_if_cpp_installed
from mooncake.master import logs
from mooncake.master.config import MasterConfig
from mooncake.master.counters import Counters
from mooncake.master.flag_table import FLAGS, Value
from mooncake.master.flags import Settings, help_text, parse_command_line, read_settings
from mooncake.master.reign import Reign
from mooncake.master.service import MasterService
from mooncake.master.snapshots.settings import SnapshotSettings, snapshot_settings
from mooncake.master.tenants.credentials import open_credentials
from mooncake.master.tenants.policy import Policy, open_policy
from mooncake.master.tenants.reload import reload_quotas
from mooncake.rpc.descriptors import allow_many
from mooncake.security.secret import is_loopback, read_admin_key, read_secret, warn_if_exposed
from mooncake.security.tls_files import check_files, name_files
from mooncake.version import __version__

if TYPE_CHECKING:
    from mooncake.metadata.server import MetadataServer

logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_UNLOGGED = {"config_path", "port", "rpc_port", "max_threads"}
_SIOCGIFADDR = 0x8915  # linux/sockios.h


def main() -> int:
    """Returns the exit code: 0 after SIGINT or SIGTERM, 1 if it could not start."""
    for number in _SIGNALS:
        signal.signal(number, lambda *_: os._exit(0))  # until the loop takes them over
    try:
        refuse_if_cpp_installed()
        command_line = parse_command_line(sys.argv[1:])
        if command_line.wants_help:
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `--help | head` is no error
            print(help_text())
            return 0
        if command_line.wants_version:
            print(f"{logs.PROGRAM} version {__version__} (git: mooncake-py)")
            return 0
        settings = read_settings(command_line)
        _configure_logs(settings.values)
        uvloop.new_event_loop().run_until_complete(_run(settings))
    except (ConfigError, ImportError) as error:
        print(f"{logs.PROGRAM}: {error}", file=sys.stderr)
        return 1
    logging.shutdown()
    os._exit(0)  # taking a million objects apart one by one would take seconds


async def _run(settings: Settings) -> None:
    """Serve until a signal comes; as one of several masters, only while elected.  Raises ConfigError if a port cannot
    be had."""
    values = settings.values
    allow_many()
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        loop.add_signal_handler(number, stopped.set)
    name_files(str(values["tls_cert_file"]), str(values["tls_key_file"]), str(values["tls_ca_file"]))
    check_files()
    config, policy = _master_config(settings)
    snapshots = snapshot_settings(values)
    admin_socket = _listen(str(values["metrics_host"]), int(values["metrics_port"]), "metrics_host", "metrics_port")
    metadata_socket = _listen_for_metadata(values)
    if policy is not None and values["tenant_quota_connector_uri"]:
        loop.add_signal_handler(signal.SIGHUP, lambda: None)  # nobody's quotas yet
    for note in settings.notes:
        logger.warning("%s", note)
    if not values["enable_ha"]:
        service = await _serve(config, _port_flag(values), snapshots)
        _warn_if_exposed(config, values)
        await _serve_until(stopped, service, settings, policy, admin_socket, _start_metadata(values, metadata_socket))
        return
    from mooncake.cli.standing import Standing

    _check_secrets(config)
    rpc_socket = _listen(config.rpc_address, config.rpc_port, "rpc_address", _port_flag(values))
    standing = Standing(values, config.rpc_address, rpc_socket)
    _warn_if_exposed(config, values)
    metadata = loop.create_task(_start_metadata(values, metadata_socket))
    reign = await standing.wait(admin_socket, stopped)
    if reign is None:
        return
    try:
        config, policy = _master_config(settings)  # with the tenants' quotas as they are by now
        service = await _serve(config, _port_flag(values), snapshots, reign, rpc_socket)
        watch = loop.create_task(standing.watch(service, stopped))
        await _serve_until(stopped, service, settings, policy, admin_socket, metadata)
        watch.cancel()
    finally:
        await standing.resign()
    if reign.reason:
        standing.begin_anew()


def _check_secrets(config: MasterConfig) -> None:
    """Raises ConfigError for what an elected master could not serve with: a standby says it now."""
    read_admin_key()
    open_credentials(config.tenant_credentials_file, read_secret())


def _warn_if_exposed(config: MasterConfig, values: Mapping[str, Value]) -> None:
    hosts = config.rpc_address, str(values["metrics_host"])
    exposed = [host for host in hosts if not is_loopback(host)]
    warn_if_exposed(logger, "this master", (exposed or hosts)[0], read_secret())


def _port_flag(values: Mapping[str, Value]) -> str:
    return "rpc_port" if values["rpc_port"] else "port"


async def _serve(
    config: MasterConfig,
    flag: str,
    snapshots: SnapshotSettings | None,
    reign: Reign | None = None,
    rpc_socket: socket.socket | None = None,
) -> MasterService:
    service = MasterService(config, Counters(), reign)
    directory, restored = service.directory, None
    if snapshots is not None and snapshots.restores:
        from mooncake.master.snapshots.restore import restore

        restored = await restore(directory, snapshots)
    try:
        await service.start(rpc_socket)
    except OSError as error:
        raise _no_port(config.rpc_address, config.rpc_port, "rpc_address", flag, error) from None
    if restored is not None:
        service.spawn(restored.finish(directory))
    if snapshots is not None and snapshots.writes:
        from mooncake.master.snapshots.keeper import Keeper

        keeper = Keeper(directory, snapshots)
        service.take_snapshot = keeper.take
        service.spawn(keeper.run())
    return service


async def _serve_until(
    stopped: asyncio.Event,
    service: MasterService,
    settings: Settings,
    policy: Policy | None,
    admin_socket: socket.socket,
    metadata: "Awaitable[MetadataServer | None]",
) -> None:
    """`metadata`: the HTTP metadata server, if there is one, when it has started."""
    values = settings.values
    service.tenant_policy = policy
    if policy is not None and values["tenant_quota_connector_uri"]:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, lambda: service.spawn(reload_quotas(service)))
    logger.info(
        "Master service started on port %d, max_threads=%d, %s", service.port, settings.max_threads, _shown(values)
    )
    http = asyncio.create_task(_start_http(service, values, admin_socket, metadata))
    http.add_done_callback(lambda task: stopped.set() if not task.cancelled() and task.exception() else None)
    await stopped.wait()
    if http.done():
        http.result()  # raises what kept the HTTP server from starting
    if service.reign is None or service.reign.holds():
        logger.info("Shutdown signal received, exiting gracefully")
    http.cancel()
    await service.close()


async def _start_http(
    service: MasterService,
    values: Mapping[str, Value],
    admin_socket: socket.socket,
    metadata: "Awaitable[MetadataServer | None]",
) -> None:
    """Import the HTTP servers beside the serving loop, start them, then report until cancelled."""
    admin_module = await _imported("mooncake.master.admin")
    admin = admin_module.AdminServer(service)
    await admin.start(admin_socket)
    logger.info("Master admin server started on port %d", admin_socket.getsockname()[1])
    server = await metadata
    if server is not None and values["enable_metadata_cleanup_on_timeout"]:
        service.directory.on_expired = server.forget
    gc.freeze()  # what was imported lives as long as the process
    if values["enable_metric_reporting"]:
        await admin.report()


async def _start_metadata(
    values: Mapping[str, Value], metadata_socket: socket.socket | None
) -> "MetadataServer | None":
    if metadata_socket is None:
        return None
    module = await _imported("mooncake.metadata.server")
    server: MetadataServer = module.MetadataServer(module.Dialect.MASTER)
    await server.start(metadata_socket)
    logger.info("HTTP metadata server started on port %d", metadata_socket.getsockname()[1])
    logger.info("C++ HTTP metadata server started successfully")  # the line that start-up scripts wait for
    return server


async def _imported(module: str) -> ModuleType:
    """Import beside the serving loop; where no descriptor is left for the module's files, once there is one."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            return await loop.run_in_executor(None, import_module, module)
        except (OSError, ImportError) as error:
            if os.strerror(errno.EMFILE) not in str(error):
                raise
            logger.warning("%s cannot be imported yet: %s", module, error)
        await asyncio.sleep(1.0)


def _master_config(settings: Settings) -> tuple[MasterConfig, Policy | None]:
    """And where changes of the tenants' quotas are kept."""
    values = settings.values
    policy = open_policy(values)
    interface = str(values["rpc_interface"])
    endpoint, backend_id = str(values["kv_events_bind_endpoint"]), str(values["kv_events_backend_id"])
    publishes = bool(values["enable_kv_events"]) and bool(endpoint) and bool(backend_id)
    config = MasterConfig(
        rpc_address=_interface_address(interface) if interface else str(values["rpc_address"]),
        rpc_port=settings.rpc_port,
        lease_ms=int(values["default_kv_lease_ttl"]),
        soft_pin_ttl_ms=int(values["default_kv_soft_pin_ttl"]),
        max_soft_pin_ttl_ms=int(values["max_kv_soft_pin_ttl"]),
        allow_evict_soft_pinned=bool(values["allow_evict_soft_pinned_objects"]),
        eviction_ratio=float(values["eviction_ratio"]),
        high_watermark=float(values["eviction_high_watermark_ratio"]),
        client_ttl_s=float(values["client_ttl"]),
        put_start_discard_timeout_s=float(values["put_start_discard_timeout_sec"]),
        put_start_release_timeout_s=float(values["put_start_release_timeout_sec"]),
        allocation_strategy=str(values["allocation_strategy"]),
        max_finished_tasks=int(values["max_total_finished_tasks"]),
        max_pending_tasks=int(values["max_total_pending_tasks"]),
        max_processing_tasks=int(values["max_total_processing_tasks"]),
        pending_task_timeout_s=float(values["pending_task_timeout_sec"]),
        processing_task_timeout_s=float(values["processing_task_timeout_sec"]),
        max_task_retries=int(values["max_retry_attempts"]),
        enable_offload=bool(values["enable_offload"]),
        offload_on_evict=bool(values["offload_on_evict"]),
        offload_force_evict=bool(values["offload_force_evict"]),
        offloading_queue_limit=int(values["offloading_queue_limit"]),
        offload_cap_ratio=float(values["offload_cap_ratio"]),
        enable_disk_eviction=bool(values["enable_disk_eviction"]),
        disk_quota=int(values["quota_bytes"]),
        promotion_on_hit=bool(values["promotion_on_hit"]),
        promotion_admission_threshold=int(values["promotion_admission_threshold"]),
        promotion_queue_limit=int(values["promotion_queue_limit"]),
        promotion_max_per_heartbeat=int(values["promotion_max_per_heartbeat"]),
        kv_events_endpoint=endpoint if publishes else "",
        kv_events_replay_endpoint=str(values["kv_events_replay_endpoint"]),
        kv_events_backend_id=backend_id,
        kv_events_queue_capacity=int(values["kv_events_queue_capacity"]),
        kv_events_legacy=bool(values["kv_events_emit_legacy_compat"]),
        kv_events_with_keys=bool(values["kv_events_emit_object_key"]),
        tenant_quotas=None if policy is None else policy.load(),
        tenant_credentials_file="" if policy is None else str(values["tenant_credentials_file"]),
    )
    return config, policy


def _interface_address(interface: str) -> str:
    """The IPv4 address of a network interface."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            reply = fcntl.ioctl(sock, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError as error:
            known = ", ".join(name for _, name in socket.if_nameindex())
            raise ConfigError(
                f"The flag --rpc_interface={interface} cannot be used: the interface has no IPv4 address "
                f"({error.strerror}); interfaces here are {known}."
            ) from None
    return socket.inet_ntoa(reply[20:24])


def _listen_for_metadata(values: Mapping[str, Value]) -> socket.socket | None:
    if not values["enable_http_metadata_server"]:
        return None
    host, port = str(values["http_metadata_server_host"]), int(values["http_metadata_server_port"])
    return _listen(host, port, "http_metadata_server_host", "http_metadata_server_port")


def _listen(host: str, port: int, host_flag: str, port_flag: str) -> socket.socket:
    """A listening socket; "::" takes IPv4 too."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, dualstack_ipv6=host == "::")
    except OSError as error:
        raise _no_port(host, port, host_flag, port_flag, error) from None


def _no_port(host: str, port: int, host_flag: str, port_flag: str, error: OSError) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return ConfigError(
            f"Port {port} of {host} is in use: stop the program that has it or choose another with --{port_flag}."
        )
    return ConfigError(
        f"The master cannot listen on port {port} of {host} ({error.strerror or error}): "
        f"check --{host_flag} and --{port_flag}."
    )


def _configure_logs(values: Mapping[str, Value]) -> None:
    logs.configure(
        log_dir=str(values["log_dir"]),
        logtostderr=bool(values["logtostderr"]),
        alsologtostderr=bool(values["alsologtostderr"]),
        stderrthreshold=int(values["stderrthreshold"]),
        minloglevel=int(values["minloglevel"]),
        verbosity=int(values["v"]),
    )


def _shown(values: Mapping[str, Value]) -> str:
    """All settings, as the start-up line shows them (truth values as 0 and 1)."""
    return ", ".join(
        f"{flag.name}={int(value) if isinstance(value := values[flag.name], bool) else without_password(str(value))}"
        for flag in FLAGS
        if flag.name not in _UNLOGGED
    )
