"""TLS 1.3 between the processes of a cluster: which files, and contexts of them that follow a change of the files.

Both sides of a connection show a certificate of the cluster's authority.  A context is made anew when a file has
changed; what is being replaced, or is wrong by now, leaves the former one in use.
"""

import logging
import os
import ssl
import threading
from typing import NamedTuple

from mooncake.errors import ConfigError
from mooncake.security.tls_files import CA, CERT, KEY, TlsFiles, read_files

logger = logging.getLogger("mooncake.security")

_Stamp = tuple[tuple[int, int, int], ...]


class Contexts(NamedTuple):
    """`server` asks for a client's certificate and `client` checks the server's; `public` asks for none: for ports
    whose users are outside of the cluster."""

    server: ssl.SSLContext
    client: ssl.SSLContext
    public: ssl.SSLContext


class _Kept:
    """The contexts of this process: those of the files' last state that could be used."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: TlsFiles | None = None
        self._stamp: _Stamp = ()  # of the files when they were last looked into
        self._contexts: Contexts | None = None

    def get(self, files: TlsFiles) -> Contexts:
        """Raises ConfigError if there are none yet and cannot be any."""
        with self._lock:
            if files != self._files:
                self._files, self._contexts, self._stamp = files, None, ()
            stamp = _stamp(files)
            if self._contexts is not None and stamp == self._stamp:
                return self._contexts
            try:
                self._contexts = _load(files)
            except ConfigError as error:
                if self._contexts is None:
                    raise
                logger.warning("the certificate that is there goes on being used: %s", error)
            self._stamp = stamp
            return self._contexts


_kept = _Kept()


def contexts() -> Contexts | None:
    """For a new connection; None: it is plain.  Raises ConfigError, which says what is wrong with which file."""
    files = read_files()
    return None if files is None else _kept.get(files)


def _stamp(files: TlsFiles) -> _Stamp:
    found = []
    for path in files[:3]:
        try:
            status = os.stat(path)
            found.append((status.st_mtime_ns, status.st_ino, status.st_size))
        except OSError:
            found.append((0, 0, 0))
    return tuple(found)


def _load(files: TlsFiles) -> Contexts:
    for name, path in zip((CERT, KEY, CA), files[:3], strict=True):
        _check_readable(name, path)
    server = _context(ssl.PROTOCOL_TLS_SERVER, files)
    client = _context(ssl.PROTOCOL_TLS_CLIENT, files)
    public = _context(ssl.PROTOCOL_TLS_SERVER, files)
    public.verify_mode = ssl.CERT_NONE
    _check_chain(server, client, files)
    client.check_hostname = files.check_host
    return Contexts(server, client, public)


def _check_readable(name: str, path: str) -> None:
    try:
        with open(path, "rb") as file:
            file.read(1)
    except OSError as error:
        raise ConfigError(f"the file {path} that {name} names cannot be read ({error.strerror})") from None


def _context(protocol: int, files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # sessions are not resumed; what comes unasked would look like a message
    try:
        context.load_verify_locations(files.ca)
    except (ssl.SSLError, OSError):
        raise ConfigError(f"the file {files.ca} that {CA} names holds no certificate in PEM form") from None
    try:
        context.load_cert_chain(files.cert, files.key, password=_refuse_password)
    except ssl.SSLError as error:
        raise ConfigError(_why_not_loaded(files, error)) from None
    except (OSError, ValueError):
        raise ConfigError(f"the key {files.key} that {KEY} names is encrypted; give one without a password") from None
    return context


def _refuse_password() -> str:
    raise ValueError


def _why_not_loaded(files: TlsFiles, error: ssl.SSLError) -> str:
    if error.reason == "KEY_VALUES_MISMATCH":
        return f"the key {files.key} that {KEY} names is not that of the certificate {files.cert} that {CERT} names"
    for name, path, begins in ((CERT, files.cert, b" CERTIFICATE-----"), (KEY, files.key, b" PRIVATE KEY-----")):
        with open(path, "rb") as file:
            if begins not in file.read(1 << 20):
                return f"the file {path} that {name} names holds no {begins.strip(b' -').decode().lower()} in PEM form"
    return f"{CERT} {files.cert} and {KEY} {files.key} cannot be used ({error.reason or error})"


def _check_chain(server: ssl.SSLContext, client: ssl.SSLContext, files: TlsFiles) -> None:
    """Speak with ourselves: what others would refuse in our certificate is said here.  Raises ConfigError."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    waiting = list(ends)
    try:
        for _ in range(8):
            for end in list(waiting):
                try:
                    end.do_handshake()
                    waiting.remove(end)
                except ssl.SSLWantReadError:
                    pass
        ends[0].write(b"x")
        ends[1].read(1)
    except ssl.SSLCertVerificationError as error:
        raise ConfigError(
            f"the certificate {files.cert} that {CERT} names is not accepted by the authority {files.ca} that {CA} "
            f"names: {error.verify_message}"
        ) from None
    except ssl.SSLError as error:
        raise ConfigError(f"the certificate {files.cert} that {CERT} names cannot be used: {error.reason}") from None
