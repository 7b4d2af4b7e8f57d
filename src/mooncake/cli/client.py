"""`mooncake_client`: a segment server started by hand, which contributes memory to a pool and outlives every engine."""

import argparse
import logging
import secrets
import signal
import sys

from mooncake.cli.arguments import Parser, whole
from mooncake.cli.gflags import size, spelled, truth
from mooncake.errors import ConfigError, MooncakeError
from mooncake.installed_once import refuse_if_cpp_installed
from mooncake.version import __version__


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="mooncake_client", description="Contribute memory to a KV-cache pool from a process of its own."
    )
    add = parser.add_argument
    add("--host", default="0.0.0.0", help="name or address that other hosts reach this one by (default %(default)s)")
    add("--port", type=whole, default=50052, help="where setup_dummy finds this process; part of the segment's name")
    add(
        "--metadata_server",
        default="P2PHANDSHAKE",
        help="where to publish the segment: http://HOST:PORT/metadata, etcd://HOST:PORT, redis://HOST:PORT; "
        "P2PHANDSHAKE: nowhere (default)",
    )
    add(
        "--master_server_address",
        default="127.0.0.1:50051",
        help="host:port of the master (default %(default)s); etcd://HOST:PORT, redis://HOST:PORT or "
        "k8s://NAMESPACE/LEASE where several elect the one that leads",
    )
    add("--protocol", default="tcp", help="tcp, or rdma where present (default %(default)s)")
    add("--device_names", default="", help="RDMA devices; unused with tcp")
    add("--global_segment_size", type=size, default="4 GB", help="memory to contribute (default %(default)s)")
    add("--local_buffer_size", type=size, default="0", help="accepted; a segment server needs no buffer")
    add("--threads", type=whole, default=1, help="accepted; every tcp stream has a thread of its own")
    add("--tenant_id", default="default", help="whose keys the stores name that join with setup_dummy")
    add(
        "--enable_offload",
        type=truth,
        nargs="?",
        const=True,
        default=False,
        help="keep values on disk too, in the directory $MOONCAKE_OFFLOAD_FILE_STORAGE_PATH (/data/file_storage)",
    )
    add(
        "--start_offload_rpc_server",
        type=truth,
        nargs="?",
        const=True,
        default=True,
        help="accepted; values on disk are served on the data port",
    )
    add("--enable_http_server", type=truth, nargs="?", const=True, default=False, help="serve /health and /metrics")
    add("--http_port", type=whole, default=9300, help="port of --enable_http_server (default %(default)s)")
    add("--version", action="version", version=f"mooncake_client version {__version__}")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    try:
        refuse_if_cpp_installed()
    except ImportError as error:
        print(f"mooncake_client: {error}", file=sys.stderr)
        return 1
    parser = _parser()
    options = parser.parse_args(spelled(parser, sys.argv[1:] if arguments is None else arguments))
    logging.basicConfig(level=logging.INFO, format="%(levelname).1s %(asctime)s %(name)s: %(message)s")
    try:
        return _serve(options)
    except (MooncakeError, OSError) as error:
        print(f"mooncake_client: {error}", file=sys.stderr)
        return 1


def _serve(options: argparse.Namespace) -> int:
    from mooncake.client.session import ClientConfig
    from mooncake.offload import offload_settings
    from mooncake.rpc.serving_messages import Serve
    from mooncake.rpc.task_messages import Introduction
    from mooncake.security.secret import read_secret, warn_if_exposed
    from mooncake.segment.desk import open_desk
    from mooncake.segment.server import SegmentServer
    from mooncake.transfer.host import host_id
    from mooncake.transfer.listening import listen_address

    config = ClientConfig(
        local_hostname=f"{options.host}:{options.port}",
        metadata_server=options.metadata_server,
        segment_size=options.global_segment_size,
        buffer_size=options.local_buffer_size,
        protocol=options.protocol.lower(),
        master=options.master_server_address,
    )
    config.check()
    if not config.segment_size:
        raise ConfigError("--global_segment_size is 0: there is nothing to contribute; expected a size such as 4GB")
    host = _reachable(options.host)
    server = SegmentServer(
        Serve(
            segment=secrets.randbits(62) + 1,
            name=f"{host}:{options.port}",
            size=config.segment_size,
            listen=config.bind_address or listen_address(options.host),
            announce=host,
            min_port=config.min_data_port,
            max_port=config.max_data_port,
            master=config.master,
            client=f"{secrets.randbits(64)}-{secrets.randbits(64)}",
            host=host_id(),
            protocol="tcp",
            socket_dir=config.socket_dir,
            metadata=config.metadata,
            endpoint=f"{host}:{options.port}" if config.metadata else "",
            disk=offload_settings("", config.segment_size) if options.enable_offload else None,
        )
    )
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: server.stop())
    http = None
    if options.enable_http_server:
        from mooncake.client.http import ClientHttpServer

        http = ClientHttpServer(options.http_port, lambda: server.mounted, server.figures, flag="--http_port")
    server.start()
    log = logging.getLogger("mooncake.segment")
    warn_if_exposed(log, "this segment server", config.bind_address or listen_address(options.host), read_secret())
    log.info(
        "segment %s of %d bytes is mounted at master %s, data on %s",
        server.info.name,
        server.info.size,
        config.master,
        server.info.tcp,
    )
    open_desk(
        listen_address(options.host),
        options.port,
        Introduction(config.master, config.metadata_server, config.protocol, host, options.tenant_id),
    )
    server.run()
    if http is not None:
        http.close()
    server.close()
    return 0


def _reachable(host: str) -> str:
    """What to tell others: 0.0.0.0 and :: are where to listen, not where we are."""
    import socket

    if host not in ("0.0.0.0", "::", ""):
        return host
    family, target = (socket.AF_INET6, "2001:db8::1") if host == "::" else (socket.AF_INET, "192.0.2.1")
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, 9))  # sends nothing: asks the routing table for our own address
            return str(probe.getsockname()[0])
        except OSError:
            return "::1" if host == "::" else "127.0.0.1"


if __name__ == "__main__":
    sys.exit(main())
