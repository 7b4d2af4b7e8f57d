"""A blocking socket that speaks TLS, used as the plain ones are.

What the kernel does for a plain socket is done here: a time limit that is reached is BlockingIOError, MSG_WAITALL
fills the buffer, other flags are hints without effect.  Records have 16 KiB, and the library gives out one a call.
Memory that may not be mapped must not come near it: the library touches it itself, so a bad address ends the process.
"""

import errno
import selectors
import socket
import ssl
from typing import Any, cast

from mooncake.errors import ConfigError
from mooncake.security.tls import contexts
from mooncake.security.tls_files import CA, CERT, KEY


class TlsSocket(ssl.SSLSocket):
    """Made by `wrap_client` and `wrap_server` only."""

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        try:
            return super().recv(buflen)
        except (TimeoutError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise _nothing_yet() from None
        except ssl.SSLError as error:
            raise _refused(error) from None
        except ValueError:
            raise _closed() from None

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:
        view = memoryview(buffer).cast("B")
        view = view[:nbytes] if nbytes else view
        done, size = 0, len(view)
        try:
            while done < size:
                got = cast(int, self.read(size - done, view[done:]))
                done += got
                if not got or not flags & socket.MSG_WAITALL:
                    break
        except (TimeoutError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            if not done:
                raise _nothing_yet() from None
        except ssl.SSLError as error:
            raise _refused(error) from None
        except ValueError:
            raise _closed() from None
        return done

    def send(self, data: Any, flags: int = 0) -> int:
        try:
            return super().send(data)
        except (TimeoutError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise _nothing_yet() from None
        except ssl.SSLError as error:
            self._read_alert()
            raise _refused(error) from None
        except ValueError:
            raise _closed() from None

    def _read_alert(self) -> None:
        """The other side has gone, and may have said why.  Raises OSError if it has."""
        try:
            self.read(1)
        except ssl.SSLError as error:
            if "ALERT" in (error.reason or ""):
                raise _refused(error) from None
        except (OSError, ValueError):
            pass

    def sendall(self, data: Any, flags: int = 0) -> None:
        view = memoryview(data).cast("B")
        at = 0
        while at < len(view):
            at += self.send(view[at:])

    def shutdown(self, how: int) -> None:
        """Of the connection below: another thread that reads or writes comes back, and nothing is ever sent plain."""
        socket.socket.shutdown(self, how)

    def shake(self) -> int:
        """Go on with the handshake of one that does not block: 0 when it is through, else the selectors' event to wait
        for.  Raises OSError."""
        try:
            self.do_handshake()
        except ssl.SSLWantReadError:
            return selectors.EVENT_READ
        except ssl.SSLWantWriteError:
            return selectors.EVENT_WRITE
        return 0


def wrap_client(sock: socket.socket, host: str) -> socket.socket:
    """`sock`, a new connection to `host` that has a time limit, speaking TLS if this process is told to.

    Raises OSError with a sentence if the two do not go together; `sock` is closed then.
    """
    try:
        found = contexts()
    except ConfigError as error:
        sock.close()
        raise OSError(errno.EINVAL, str(error)) from None
    if found is None:
        return sock
    wrapped = _made(found.client, sock, server_hostname=host)
    try:
        wrapped.do_handshake()
    except BaseException as error:
        wrapped.close()
        if isinstance(error, OSError):
            raise OSError(errno.EPROTO, why_not(error)) from None
        raise
    return wrapped


def wrap_server(sock: socket.socket) -> TlsSocket:
    """The side that answers; its handshake is to come.  Raises OSError, ConfigError; `sock` is closed then."""
    found = contexts()
    assert found is not None
    return _made(found.server, sock, server_side=True)


def _made(context: ssl.SSLContext, sock: socket.socket, **how: Any) -> TlsSocket:
    context.sslsocket_class = TlsSocket
    try:
        return cast(TlsSocket, context.wrap_socket(sock, do_handshake_on_connect=False, **how))
    except BaseException:
        sock.close()
        raise


def why_not(error: OSError) -> str:
    """Why a client's handshake failed, for people."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the other side's certificate is not accepted ({error.verify_message}); both sides need the same {CA}"
    reason = error.reason if isinstance(error, ssl.SSLError) else ""
    if isinstance(error, TimeoutError):
        return "it did not answer TLS in time"
    if isinstance(error, ssl.SSLEOFError | ConnectionError) or reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST"):
        return f"the other side does not speak TLS; set {CERT}, {KEY} and {CA} there too, or nowhere"
    return f"TLS failed ({reason or error.strerror or error})"


def _refused(error: ssl.SSLError) -> OSError:
    """What the other side's alert says: with TLS 1.3 it looks at our certificate after we are through."""
    if "ALERT" in (error.reason or ""):
        alert = error.reason.partition("ALERT_")[2].replace("_", " ").lower()
        return OSError(errno.EPROTO, f"the other side does not accept this one's certificate ({alert}): look at {CERT}")
    if isinstance(error, ssl.SSLEOFError):
        return ConnectionResetError(errno.ECONNRESET, "the other side closed the connection")
    return error


class _NothingYet(BlockingIOError, TimeoutError):
    """As a plain socket of ours says it, and as the standard library's users of TLS expect it."""


def _nothing_yet() -> BlockingIOError:
    return _NothingYet(errno.EAGAIN, "nothing has moved within the time limit")


def _closed() -> OSError:
    return OSError(errno.EBADF, "the stream is closed")
