"""Whether connections speak TLS, and with which files: read again for every new connection."""

import os
from typing import NamedTuple

from mooncake.errors import ConfigError

CERT, KEY, CA = "MOONCAKE_TLS_CERT", "MOONCAKE_TLS_KEY", "MOONCAKE_TLS_CA"
CHECK_HOST = "MOONCAKE_TLS_CHECK_HOST"
EXPECTED = f"this port speaks TLS; set {CERT}, {KEY} and {CA} there too"
CLIENT_HELLO = b"\x16"  # the first byte of every connection that speaks TLS
PLAIN_HTTP = (  # the answer to a request that was not
    b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s\n"
    % (len(EXPECTED) + 1, EXPECTED.encode())
)


class TlsFiles(NamedTuple):
    """Paths of PEM files: this process's certificate (with those between it and the authority's), its key, and the
    authority's certificate.  `check_host`: whether a server's certificate must name the host that was asked for."""

    cert: str
    key: str
    ca: str
    check_host: bool


def read_files() -> TlsFiles | None:
    """What the environment says; None: no TLS.  Raises ConfigError if it says half of it."""
    paths = {name: os.environ.get(name, "") for name in (CERT, KEY, CA)}
    if not any(paths.values()):
        return None
    missing = [name for name, path in paths.items() if not path]
    if missing:
        raise ConfigError(f"{' and '.join(missing)} must be set too: TLS takes a certificate, its key and an authority")
    check = os.environ.get(CHECK_HOST, "").lower()
    if check not in ("", "0", "1", "false", "true"):
        raise ConfigError(f"{CHECK_HOST} is {check[:40]!r}; expected 1 (names are checked) or 0")
    return TlsFiles(paths[CERT], paths[KEY], paths[CA], check in ("1", "true"))


def speaks_tls() -> bool:
    """Whether this process is told to speak TLS, rightly or not."""
    return any(os.environ.get(name) for name in (CERT, KEY, CA))


def check_files() -> None:
    """Raises ConfigError that says what is wrong with the files, if TLS is to be spoken with them."""
    if speaks_tls():
        from mooncake.security.tls import contexts

        contexts()


def scheme() -> str:
    """Of the URLs of the cluster's own HTTP servers."""
    return "https" if speaks_tls() else "http"


def name_files(cert: str, key: str, ca: str) -> None:
    """As if the environment named those that are not ""."""
    for name, path in ((CERT, cert), (KEY, key), (CA, ca)):
        if path:
            os.environ[name] = path
