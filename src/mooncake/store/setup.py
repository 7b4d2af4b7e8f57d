"""What setup() accepts, in both its forms, and the code it ends with."""

import logging
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mooncake.config_text import parse_bool, parse_size
from mooncake.errors import ConfigError, ErrorCode, MetadataError, MooncakeError, StoreError

if TYPE_CHECKING:
    from mooncake.client.client import StoreClient
    from mooncake.client.session import ClientConfig
    from mooncake.engine import InnerTransferEngine

logger = logging.getLogger("mooncake.store")

_POSITIONAL = (
    "local_hostname",
    "metadata_server",
    "global_segment_size",
    "local_buffer_size",
    "protocol",
    "rdma_devices",
    "master_server_addr",
    "engine",
    "enable_ssd_offload",
    "ssd_offload_path",
    "tenant_id",
    "enable_client_http_server",
    "client_http_port",
)
_REQUIRED = _POSITIONAL[:7]
_DEFAULTS: dict[str, Any] = {
    "engine": None,
    "enable_ssd_offload": False,
    "ssd_offload_path": "",
    "tenant_id": "default",
    "enable_client_http_server": False,
    "client_http_port": 9300,
}
_DICT_DEFAULTS: dict[str, Any] = {
    **_DEFAULTS,
    "global_segment_size": 16 << 20,
    "local_buffer_size": 16 << 20,
    "protocol": "tcp",
    "rdma_devices": "",
    "master_server_addr": "127.0.0.1:50051",
    "ipc_socket_path": "",
}
_DICT_SETTINGS = sorted({*_REQUIRED, *_DICT_DEFAULTS} - {"engine"})
# Configuration files call them otherwise, and clients pass what these say on (LMCache does).
_OTHER_NAMES = {"master_server_address": "master_server_addr", "device_name": "rdma_devices"}
_PORT = re.compile(r".*[^:]:\d+|\[.*\]:\d+")


class SetupError(MooncakeError):
    """Setup cannot succeed; `code` is what it returns, the text says why."""

    def __init__(self, code: ErrorCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code


def open_client(args: tuple[Any, ...], kwargs: dict[str, Any]) -> "StoreClient":
    """A client that has joined the pool.  Raises SetupError; TypeError for arguments that no form has."""
    settings = _settings(args, kwargs)
    explicit = bool(_PORT.fullmatch(str(settings["local_hostname"])))
    failed = ErrorCode.INVALID_PARAMS if explicit else ErrorCode.INTERNAL_ERROR
    try:
        return _join(settings)
    except (ConfigError, MetadataError, StoreError, OSError) as error:
        raise SetupError(failed, str(error)) from None


def _settings(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    if len(args) == 1 and isinstance(args[0], Mapping) and not kwargs:
        settings = {**_DICT_DEFAULTS, **_by_usual_names(args[0])}
        for name in ("local_hostname", "metadata_server"):
            if name not in settings:
                raise SetupError(ErrorCode.INVALID_PARAMS, f"the configuration lacks {name}, which is required")
    else:
        if len(args) > len(_POSITIONAL):
            raise TypeError(f"setup() takes at most {len(_POSITIONAL)} arguments ({len(args)} given)")
        settings = {**_DEFAULTS, **dict(zip(_POSITIONAL, args, strict=False))}
        for name, value in kwargs.items():
            if name not in _POSITIONAL or name in _POSITIONAL[: len(args)]:
                raise TypeError(f"setup() got an unexpected or repeated keyword argument '{name}'")
            settings[name] = value
        missing = [name for name in _REQUIRED if name not in settings]
        if missing:
            raise TypeError(f"setup() lacks the arguments {', '.join(missing)}")
    for name in ("global_segment_size", "local_buffer_size", "client_http_port"):
        try:
            settings[name] = parse_size(settings[name])
        except ValueError as error:
            raise SetupError(ErrorCode.INVALID_PARAMS, f"{name}: {error}") from None
    for name in ("enable_ssd_offload", "enable_client_http_server"):
        try:
            settings[name] = parse_bool(settings[name])
        except ValueError as error:
            raise SetupError(ErrorCode.INVALID_PARAMS, f"{name}: {error}") from None
    return settings


def _by_usual_names(config: Mapping[Any, Any]) -> dict[str, Any]:
    """A configuration's values; where both names of one setting are there, that of the argument wins."""
    given = {str(name): value for name, value in config.items()}
    other = {_OTHER_NAMES[name]: given.pop(name) for name in _OTHER_NAMES if name in given}
    unknown = sorted(set(given) - set(_DICT_DEFAULTS) - set(_REQUIRED))
    if unknown:
        logger.warning("setup does not know %s; its settings are %s", ", ".join(unknown), ", ".join(_DICT_SETTINGS))
    return {**other, **given}


def _engine(given: Any) -> "InnerTransferEngine | None":
    """The initialized transfer engine that setup was given, if any.  Raises ConfigError for anything else."""
    if given is None:
        return None
    from mooncake.engine import InnerTransferEngine, TransferEngine

    inner = given.get_engine() if isinstance(given, TransferEngine) else given
    if not isinstance(inner, InnerTransferEngine) or not inner.owner.get_rpc_port():
        raise ConfigError("engine= takes the get_engine() of a TransferEngine whose initialize has succeeded, or None")
    return inner


def _add_disk(config: "ClientConfig", path: str) -> None:
    """Raises ValueError for a directory that cannot be used, as the drop-in does; ConfigError for other mistakes."""
    from mooncake.offload import OffloadPathError, offload_settings

    if not config.segment_size:
        logger.warning(
            "enable_ssd_offload has no effect with global_segment_size 0: nothing of ours is to be offloaded"
        )
        return
    try:
        config.disk = offload_settings(path, config.segment_size)
    except OffloadPathError as error:
        raise ValueError(str(error)) from None


def _join(settings: dict[str, Any]) -> "StoreClient":
    from mooncake.client.session import SMALLEST_SEGMENT, ClientConfig, Session

    engine = _engine(settings["engine"])
    config = ClientConfig(
        local_hostname=str(settings["local_hostname"]),
        metadata_server=str(settings["metadata_server"]),
        segment_size=settings["global_segment_size"],
        buffer_size=settings["local_buffer_size"],
        protocol=str(settings["protocol"]).lower(),
        master=str(settings["master_server_addr"]),
        shares_engine=engine is not None,
        tenant=str(settings["tenant_id"]),
    )
    if settings["enable_ssd_offload"]:
        _add_disk(config, str(settings["ssd_offload_path"]))
    if not config.local_hostname or 0 < config.segment_size < SMALLEST_SEGMENT:
        try:
            config.check()
        except ConfigError as error:
            raise SetupError(ErrorCode.INVALID_PARAMS, str(error)) from None
    session = Session(config)  # starts the private server, which boots while numpy is imported
    try:
        from mooncake.client.client import StoreClient

        client = StoreClient(session, engine)
    except BaseException:
        session.close()
        raise
    try:
        if settings["enable_client_http_server"]:
            client.serve_http(settings["client_http_port"])
    except BaseException:
        client.close()
        raise
    return client
