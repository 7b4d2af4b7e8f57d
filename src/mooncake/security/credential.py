"""A tenant's credential: NAME:TOKEN at the client, and what the master knows of it, from which it cannot be made.

A client's key is an HMAC of its token; the master has the key's SHA-256, the *verifier*.  The proof is the key, masked
with an HMAC by the verifier over both sides' nonces: who has the verifier gets the key out of it and sees that it is
the right one; a proof is worth nothing on another connection, or for another name.  (The construction of SCRAM,
RFC 5802, without its salt and iterations: a token is random.)
"""

import hashlib
import hmac
import secrets
from collections.abc import Iterable
from typing import Self

from mooncake.errors import ConfigError
from mooncake.security.secret import SHORTEST, is_secret, read_text

TENANT_TOKEN = "MOONCAKE_TENANT_TOKEN"  # noqa: S105 (the variable, not what it holds)
TENANT_TOKEN_FILE = "MOONCAKE_TENANT_TOKEN_FILE"  # noqa: S105


class Credential:
    """Never shown: neither its text nor its repr holds the token."""

    __slots__ = ("_key", "tenant")

    def __init__(self, tenant: str, token: str) -> None:
        self.tenant = tenant
        self._key = hmac.digest(token.encode(), b"mooncake-py tenant\0" + tenant.encode(), "sha256")

    def __repr__(self) -> str:
        return f"Credential({self.tenant!r}, …)"

    @classmethod
    def new(cls, tenant: str) -> tuple[Self, str]:
        """One for a tenant, and the text that its clients need."""
        token = secrets.token_hex(32)
        return cls(tenant, token), f"{tenant}:{token}"

    @property
    def verifier(self) -> bytes:
        return hashlib.sha256(self._key).digest()

    def proof(self, client_nonce: bytes, server_nonce: bytes) -> bytes:
        return _masked(self._key, self.verifier, self.tenant, client_nonce, server_nonce)


def proves(proof: bytes, verifiers: Iterable[bytes], tenant: str, client_nonce: bytes, server_nonce: bytes) -> bool:
    """Whether it is that of a credential of `tenant` with one of these verifiers."""
    return any(
        len(proof) == len(verifier)
        and hmac.compare_digest(
            hashlib.sha256(_masked(proof, verifier, tenant, client_nonce, server_nonce)).digest(), verifier
        )
        for verifier in verifiers
    )


def _masked(data: bytes, verifier: bytes, tenant: str, client_nonce: bytes, server_nonce: bytes) -> bytes:
    parts = b"mooncake-py", b"tenant", tenant.encode(), client_nonce, server_nonce
    mask = hmac.digest(verifier, b"".join(len(part).to_bytes(4, "little") + part for part in parts), "sha256")
    return bytes(a ^ b for a, b in zip(data, mask, strict=True))


def read_credential() -> Credential | None:
    """Of MOONCAKE_TENANT_TOKEN, or of the file that MOONCAKE_TENANT_TOKEN_FILE names; None if neither is set.

    Raises ConfigError if the file cannot be read, or it is no credential.
    """
    text, origin = read_text(TENANT_TOKEN, TENANT_TOKEN_FILE, "the tenant's credential")
    if not text:
        return None
    tenant, _, token = text.rpartition(":")
    if not tenant or not is_secret(token):
        raise ConfigError(
            f"{origin} is no credential: expected NAME:TOKEN with a token of {SHORTEST} or more printable ASCII "
            "characters without spaces, as `mooncake tenant NAME` prints it"
        )
    return Credential(tenant, token)
