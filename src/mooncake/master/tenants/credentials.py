"""Who may be which tenant: the file that --tenant_credentials_file names.

    # a line a credential: the tenant's name, and what `mooncake tenant NAME` prints for the master
    team-a:6f1c…64 hexadecimal digits

A name may be there more than once: that is how a credential is replaced.  The file is read again when it has changed.
"""

from __future__ import annotations

import logging
import os
import stat
import time

from mooncake.errors import ConfigError, ErrorCode, StoreError
from mooncake.master.tenants.names import wrong_name
from mooncake.security.credential import TENANT_TOKEN, proves
from mooncake.security.secret import TOKEN, Secret

logger = logging.getLogger("mooncake.master")

_LARGEST = 1 << 20  # bytes of the file
_LOOK_S = 1.0
_DIGITS = 64


class Credentials:
    """`check` is quick; every _LOOK_S it looks whether the file is another by now."""

    def __init__(self, path: str) -> None:
        """Raises ConfigError."""
        self._path = path
        self._stamp = _stamp(path)
        self._verifiers = _load(path)
        self._looked = time.monotonic()

    def check(self, tenant: str, proof: bytes, client_nonce: bytes, server_nonce: bytes) -> bool:
        """Whether the proof is that of a credential of `tenant`."""
        now = time.monotonic()
        if now > self._looked + _LOOK_S:
            self._looked = now
            self._look()
        return proves(proof, self._verifiers.get(tenant, ()), tenant, client_nonce, server_nonce)

    def vet(self, tenant: str, proof: bytes, client_nonce: bytes, server_nonce: bytes) -> None:
        """Raises StoreError (ILLEGAL_CLIENT) unless `check`."""
        if not self.check(tenant, proof, client_nonce, server_nonce):
            raise StoreError(
                ErrorCode.ILLEGAL_CLIENT,
                f"tenant {tenant[:200]!r} must be proved here; set {TENANT_TOKEN} to its credential",
            )

    def _look(self) -> None:
        stamp = _stamp(self._path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._verifiers = _load(self._path)
        except ConfigError as error:
            logger.warning("the credentials of before go on being used: %s", error)
        else:
            logger.info("the tenants' credentials were read again from %s", self._path)


def open_credentials(path: str, secret: Secret | None) -> Credentials | None:
    """None: whoever says so is a tenant.  Raises ConfigError."""
    if not path:
        return None
    if secret is None:
        raise ConfigError(
            f"--tenant_credentials_file needs the cluster's secret, {TOKEN}: without it everybody reaches the ports of "
            "segment servers, where all tenants' values lie."
        )
    return Credentials(path)


def _stamp(path: str) -> tuple[int, int, int]:
    try:
        status = os.stat(path)
    except OSError:
        return 0, 0, 0
    return status.st_mtime_ns, status.st_ino, status.st_size


def _load(path: str) -> dict[str, list[bytes]]:
    where = f"The tenants' credentials file {path}"
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            content = file.read(_LARGEST + 1)
    except OSError as error:
        raise ConfigError(f"{where} cannot be read: {error.strerror}.") from None
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(f"{where} can be written by others, who could let themselves in: chmod go-w {path}.")
    if status.st_uid not in (0, os.geteuid()):
        raise ConfigError(f"{where} belongs to user {status.st_uid}: only root or the master's own user may own it.")
    if len(content) > _LARGEST:
        raise ConfigError(f"{where} is larger than {_LARGEST} bytes.")
    try:
        lines = content.decode().splitlines()
    except UnicodeDecodeError:
        raise ConfigError(f"{where} cannot be read: it is not UTF-8 text.") from None
    verifiers: dict[str, list[bytes]] = {}
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        name, _, digits = text.rpartition(":")
        if wrong_name(name) or len(digits) != _DIGITS or not set(digits) <= set("0123456789abcdef"):
            raise ConfigError(
                f"{where} is wrong in line {number}: expected NAME:VERIFIER with {_DIGITS} hexadecimal digits, as "
                "`mooncake tenant NAME` prints it."
            )
        verifiers.setdefault(name, []).append(bytes.fromhex(digits))
    return verifiers
