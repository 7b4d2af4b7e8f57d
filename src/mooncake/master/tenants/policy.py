"""Where the tenants' quotas are kept: a YAML file, a key of etcd, or nowhere but in this master.

    version: 1
    tenants:
      - {name: team-a, quota: 200GB}

Sizes are bytes, or text with b, kb, mb, gb or tb (powers of 1024).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Protocol

from mooncake.config_text import parse_size, read_mapping, shown
from mooncake.errors import ConfigError
from mooncake.master.tenants.names import wrong_name

_LIMIT_S = 3.0
_LARGEST = 1 << 62


class Policy(Protocol):
    """Both methods may block.  They raise ConfigError."""

    def load(self) -> dict[str, int]:
        """Quotas in bytes, by tenant."""

    def save(self, quotas: Mapping[str, int]) -> None:
        """Keep these instead."""


def open_policy(values: Mapping[str, Any]) -> Policy | None:
    """What the master's flags say; None: no tenants.  Raises ConfigError."""
    if not values["enable_multi_tenants"]:
        return None
    uri = str(values["tenant_quota_connector_uri"])
    if values["tenant_quota_connector_type"] == "etcd":
        return EtcdPolicy(uri, f"mooncake-store/{values['cluster_id']}/tenant_quota_policy")
    return FilePolicy(uri.removeprefix("file://")) if uri else ForgottenPolicy()


class ForgottenPolicy:
    """Nothing is kept: the tenants are those that were set over HTTP since the master started."""

    def load(self) -> dict[str, int]:
        return {}

    def save(self, quotas: Mapping[str, int]) -> None:
        pass


class FilePolicy:
    """A YAML file; saving replaces it as a whole."""

    def __init__(self, path: str) -> None:
        self._path = path

    def load(self) -> dict[str, int]:
        where = f"tenant quota file {self._path}"
        return _quotas(read_mapping(self._path, "tenant quota file"), where)

    def save(self, quotas: Mapping[str, int]) -> None:
        beside = f"{self._path}.new"
        try:
            with open(beside, "w", encoding="utf-8") as file:
                file.write(_text(quotas))
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, self._path)
        except OSError as error:
            raise ConfigError(f"the tenant quota file {self._path} cannot be written: {error.strerror}") from None


class EtcdPolicy:
    """The same text under one key of etcd 3 (its JSON gateway).  A key that is not there means no tenants yet."""

    def __init__(self, uri: str, key: str) -> None:
        """Connects to nothing yet."""
        try:
            from etcd3gw import Etcd3Client
        except ImportError:
            raise ConfigError(
                "--tenant_quota_connector_type=etcd needs the package etcd3gw: pip install 'mooncake-py[etcd]'"
            ) from None
        self._uri, self._key = uri, key
        address = uri.partition("://")[2] or uri
        members = [member.strip().rstrip("/") for member in address.replace(",", ";").split(";") if member.strip()]
        self._clients = []
        for member in members:
            host, colon, port = member.rpartition(":")
            if not colon or not host or not port.isdigit():
                raise ConfigError(
                    f"--tenant_quota_connector_uri={uri} is no address of etcd: expected HOST:PORT[;HOST:PORT]"
                )
            client = Etcd3Client(host.strip("[]"), int(port), timeout=_LIMIT_S)
            client.session.trust_env = False  # a proxy for the internet is none for the cluster
            self._clients.append(client)
        if not self._clients:
            raise ConfigError("--tenant_quota_connector_type=etcd needs --tenant_quota_connector_uri=HOST:PORT")

    def load(self) -> dict[str, int]:
        import yaml

        found = self._ask("read", lambda client: client.get(self._key))
        if not found:
            return {}
        where = f"key {self._key} of etcd {self._uri}"
        try:
            content = yaml.safe_load(found[0].decode())
        except (yaml.YAMLError, UnicodeDecodeError):
            raise ConfigError(f"The {where} cannot be understood: it is not YAML.") from None
        return _quotas(content, where)

    def save(self, quotas: Mapping[str, int]) -> None:
        text = _text(quotas)
        self._ask("written", lambda client: client.put(self._key, text))

    def _ask(self, what: str, call: Any) -> Any:
        from etcd3gw.exceptions import Etcd3Exception

        problem: Exception | None = None
        for client in self._clients:
            try:
                return call(client)
            except (Etcd3Exception, OSError, ValueError, LookupError) as error:
                problem = error
        reason = str(problem).partition("\n")[0] or type(problem).__name__
        raise ConfigError(f"The tenants' quotas cannot be {what} at etcd {self._uri}: {reason[:200]}.")


def _text(quotas: Mapping[str, int]) -> str:
    import yaml

    tenants = [{"name": name, "quota": quota} for name, quota in quotas.items()]
    return yaml.safe_dump({"version": 1, "tenants": tenants}, sort_keys=False, allow_unicode=True)


def _quotas(content: Any, where: str) -> dict[str, int]:
    """The quotas that `content`, found in `where`, states.  Raises ConfigError."""
    if not isinstance(content, Mapping) or content.get("version") != 1:
        raise ConfigError(f"The {where} is wrong: expected a mapping with version: 1 and tenants.")
    listed = content.get("tenants")
    if listed is None:
        listed = []
    if not isinstance(listed, list):
        raise ConfigError(f"The {where} is wrong in tenants: expected a list of {{name, quota}}.")
    quotas: dict[str, int] = {}
    for item in listed:
        if not isinstance(item, Mapping) or set(map(str, item)) != {"name", "quota"}:
            raise ConfigError(f"The {where} is wrong in tenants: expected name and quota, but found {shown(item)}.")
        name = item["name"]
        wrong = wrong_name(name) if isinstance(name, str) else "expected text"
        if wrong or name in quotas:
            raise ConfigError(f"The {where} is wrong in name {shown(name)}: {wrong or 'it is there twice'}.")
        try:
            quotas[name] = parse_size(item["quota"])
            if not 0 < quotas[name] < _LARGEST:
                raise ValueError(f"expected a positive size, but found {shown(item['quota'])}")
        except ValueError as error:
            raise ConfigError(f"The {where} is wrong in the quota of {name}: {error}.") from None
    return quotas
