"""The cluster's secret: which setting it is, and proofs of knowing it that do not tell it.

Both sides of a connection draw a nonce; each proves itself by a keyed hash (HMAC-SHA256) over both nonces and its own
side's name, so that a proof of one side, or of another connection, is worth nothing.
"""

import hmac
import ipaddress
import logging
import os
import secrets

from mooncake.errors import ConfigError

TOKEN = "MOONCAKE_AUTH_TOKEN"  # noqa: S105 (the variable, not what it holds)
TOKEN_FILE = "MOONCAKE_AUTH_TOKEN_FILE"  # noqa: S105
SHORTEST = 16  # characters
ADMIN_KEY = "MOONCAKE_ADMIN_KEY"
ADMIN_KEY_FILE = "MOONCAKE_ADMIN_KEY_FILE"
BEARER_MISSING = f"this needs the header Authorization: Bearer, with the secret that {TOKEN} sets here"
NONCE_SIZE = 32  # bytes

CLIENT, SERVER = b"client", b"server"


class Secret:
    """Never shown: neither its text nor its repr holds it."""

    __slots__ = ("_key",)

    def __init__(self, text: str) -> None:
        self._key = text.encode()

    def __repr__(self) -> str:
        return "Secret(…)"

    def proof(self, side: bytes, client_nonce: bytes, server_nonce: bytes) -> bytes:
        """What `side` (CLIENT or SERVER) proves itself with."""
        parts = b"mooncake-py", side, client_nonce, server_nonce
        return hmac.digest(self._key, b"".join(len(part).to_bytes(4, "little") + part for part in parts), "sha256")

    def proves(self, proof: bytes, side: bytes, client_nonce: bytes, server_nonce: bytes) -> bool:
        """Whether `proof` is that of `side`."""
        fresh = len(client_nonce) == len(server_nonce) == NONCE_SIZE
        return fresh and hmac.compare_digest(proof, self.proof(side, client_nonce, server_nonce))

    def is_told_by(self, authorization: str) -> bool:
        """Whether an HTTP Authorization header has it ("Bearer …")."""
        scheme, _, token = authorization.partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(
            token.strip().encode(errors="surrogateescape"), self._key
        )

    def header(self) -> dict[str, str]:
        """The header that tells it, for HTTP."""
        return {"Authorization": f"Bearer {self._key.decode()}"}


def authorization() -> dict[str, str]:
    """The header that HTTP servers of this package ask for; none if there is no secret.  Raises ConfigError.

    Only for addresses that this side's own settings name: it tells the secret.
    """
    secret = read_secret()
    return {} if secret is None else secret.header()


def warn_if_exposed(logger: logging.Logger, what: str, host: str, secret: Secret | None) -> None:
    """One line in the log for whoever lets other hosts in without a secret.  `what`: the process, for people."""
    if secret is None and not is_loopback(host):
        logger.warning(
            "%s can be reached from other hosts (it listens on %s) and knows no secret: whoever reaches it can read "
            "and change everything; set %s on every process of the cluster",
            what,
            host or "all addresses",
            TOKEN,
        )


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def new_nonce() -> bytes:
    return secrets.token_bytes(NONCE_SIZE)


def read_secret() -> Secret | None:
    """The secret of MOONCAKE_AUTH_TOKEN, or of the file that MOONCAKE_AUTH_TOKEN_FILE names; None if neither is set.

    Raises ConfigError if the file cannot be read, or the secret is too short to be one.
    """
    return _read(TOKEN, TOKEN_FILE, "the cluster's secret")


def read_admin_key() -> Secret | None:
    """Likewise of MOONCAKE_ADMIN_KEY, or of the file that MOONCAKE_ADMIN_KEY_FILE names."""
    return _read(ADMIN_KEY, ADMIN_KEY_FILE, "the admin key")


def _read(variable: str, file_variable: str, what: str) -> Secret | None:
    text, origin = read_text(variable, file_variable, what)
    if not text:
        return None
    if not is_secret(text):
        raise ConfigError(
            f"{origin} is no secret: expected {SHORTEST} or more printable ASCII characters without spaces, such as "
            "what `openssl rand -hex 32` prints"
        )
    return Secret(text)


def is_secret(text: str) -> bool:
    """Whether it is long enough, and can go into a header."""
    return len(text) >= SHORTEST and text.isprintable() and " " not in text and text.isascii()


def read_text(variable: str, file_variable: str, what: str) -> tuple[str, str]:
    """What an environment variable holds, or the file that another names, and for people which of them it is; "" if
    neither is set.  `what` should be there.  Raises ConfigError."""
    text, origin = os.environ.get(variable, ""), variable
    path = os.environ.get(file_variable, "")
    if text or not path:
        return text, origin
    origin = f"the file {path} that {file_variable} names"
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(1 << 16).strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"{origin} cannot be read ({reason}); put {what} there") from None
    if not text:
        raise ConfigError(f"{origin} is empty; put {what} there")
    return text, origin
