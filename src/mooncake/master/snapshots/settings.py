"""What the snapshot flags and variables ask for, checked before the master starts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from urllib.parse import quote

import msgspec

from mooncake.config_text import environment_whole, parse_bool, shown
from mooncake.errors import ConfigError
from mooncake.master.flag_table import Value

PATH_VARIABLE = "MOONCAKE_SNAPSHOT_LOCAL_PATH"
_AWS = "MOONCAKE_AWS_"
_STORE_FLAGS = ("snapshot_object_store_type", "snapshot_payload_store_type", "snapshot_payload_backend_type")
_CATALOG_FLAGS = ("snapshot_catalog_store_type", "snapshot_catalog_backend_type")
_ADDRESS_FLAGS = ("snapshot_catalog_store_connstring", "snapshot_catalog_backend_connstring")


class S3Settings(msgspec.Struct, frozen=True):
    """The variables MOONCAKE_AWS_...; without keys, those that AWS's own variables and files give."""

    bucket: str
    region: str
    endpoint: str
    access_key_id: str
    secret_access_key: str
    use_virtual_addressing: bool
    use_https: bool
    connect_timeout_s: float
    request_timeout_s: float


class SnapshotSettings(msgspec.Struct, frozen=True):
    """`cluster` fits into a path; `folder` and `s3`: exactly one is there; `redis`: "" or the list's address."""

    writes: bool
    restores: bool
    interval_s: float
    limit_s: float
    keep: int
    cluster: str
    folder: str
    s3: S3Settings | None
    redis: str
    backup_folder: str


def snapshot_settings(values: Mapping[str, Value]) -> SnapshotSettings | None:
    """None: neither written nor read.  Raises ConfigError."""
    writes, restores = bool(values["enable_snapshot"]), bool(values["enable_snapshot_restore"])
    if not (writes or restores):
        return None
    switch = "enable_snapshot" if writes else "enable_snapshot_restore"
    where = _one_of(values, _STORE_FLAGS)
    if where not in ("local", "s3"):
        raise ConfigError(
            f"--{switch} needs --{_STORE_FLAGS[0]}=local (then the variable {PATH_VARIABLE} names a folder) or s3 "
            f"(then the variables {_AWS}... name a bucket), but found {shown(where)}."
        )
    return SnapshotSettings(
        writes=writes,
        restores=restores,
        interval_s=float(values["snapshot_interval_seconds"]),
        limit_s=float(values["snapshot_child_timeout_seconds"]),
        keep=int(values["snapshot_retention_count"]),
        cluster=quote(str(values["cluster_id"]), safe="") or "_",
        folder=_folder(os.environ.get(PATH_VARIABLE, ""), f"the variable {PATH_VARIABLE}") if where == "local" else "",
        s3=_s3() if where == "s3" else None,
        redis=_redis(values),
        backup_folder=_backup(str(values["snapshot_backup_dir"])),
    )


def _one_of(values: Mapping[str, Value], names: tuple[str, ...]) -> str:
    """The value of a flag with several names."""
    given = {name: str(values[name]) for name in names if values[name]}
    if len(set(given.values())) > 1:
        said = " and ".join(f"--{name}={value}" for name, value in given.items())
        raise ConfigError(f"{said} contradict each other: they are names of one flag; give only --{names[0]}.")
    return next(iter(given.values()), "")


def _folder(path: str, named_by: str) -> str:
    if not os.path.isabs(path):
        raise ConfigError(f"Snapshots need {named_by} to be an absolute path of a folder, but found {shown(path)}.")
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"The folder {path} of {named_by} cannot be made: {error.strerror}.") from None
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise ConfigError(f"The folder {path} of {named_by} cannot be written by this user.")
    return path


def _backup(path: str) -> str:
    return _folder(path, "--snapshot_backup_dir") if path else ""


def _redis(values: Mapping[str, Value]) -> str:
    kind, address = _one_of(values, _CATALOG_FLAGS), _one_of(values, _ADDRESS_FLAGS)
    if kind in ("", "embedded", "payload"):
        if address:
            raise ConfigError(f"--{_ADDRESS_FLAGS[0]} is only of use with --{_CATALOG_FLAGS[0]}=redis.")
        return ""
    if kind != "redis":
        raise ConfigError(f"The flag --{_CATALOG_FLAGS[0]} is wrong: expected embedded or redis, found {shown(kind)}.")
    if not address:
        raise ConfigError(f"--{_CATALOG_FLAGS[0]}=redis needs --{_ADDRESS_FLAGS[0]}=redis://HOST:PORT.")
    if find_spec("redis") is None:
        raise ConfigError(f"--{_CATALOG_FLAGS[0]}=redis needs the package redis: pip install 'mooncake-py[redis]'.")
    return address


def _s3() -> S3Settings:
    if find_spec("botocore") is None:
        raise ConfigError("Snapshots in S3 need the package botocore: pip install 'mooncake-py[s3]'.")
    text = {name: os.environ.get(_AWS + name, "") for name in _TEXTS}
    if not text["BUCKET_NAME"]:
        raise ConfigError(f"Snapshots in S3 need the variable {_AWS}BUCKET_NAME.")
    if bool(text["ACCESS_KEY_ID"]) != bool(text["SECRET_ACCESS_KEY"]):
        raise ConfigError(f"Give both {_AWS}ACCESS_KEY_ID and {_AWS}SECRET_ACCESS_KEY, or neither.")
    return S3Settings(
        bucket=text["BUCKET_NAME"],
        region=text["REGION"] or "us-east-1",
        endpoint=_url(text["S3_ENDPOINT"], _truth("USE_HTTPS")),
        access_key_id=text["ACCESS_KEY_ID"],
        secret_access_key=text["SECRET_ACCESS_KEY"],
        use_virtual_addressing=_truth("USE_VIRTUAL_ADDRESSING"),
        use_https=_truth("USE_HTTPS"),
        connect_timeout_s=environment_whole(_AWS + "CONNECT_TIMEOUT_MS", 10_000) / 1000,
        request_timeout_s=environment_whole(_AWS + "REQUEST_TIMEOUT_MS", 30_000) / 1000,
    )


_TEXTS = ("BUCKET_NAME", "REGION", "S3_ENDPOINT", "ACCESS_KEY_ID", "SECRET_ACCESS_KEY")


def _url(endpoint: str, https: bool) -> str:
    if not endpoint or "://" in endpoint:
        return endpoint
    return f"{'https' if https else 'http'}://{endpoint}"


def _truth(name: str) -> bool:
    try:
        return parse_bool(os.environ.get(_AWS + name) or "true")
    except ValueError as error:
        raise ConfigError(f"The variable {_AWS}{name} is wrong: {error}.") from None
