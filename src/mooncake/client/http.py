"""The small HTTP server beside a store or a segment server: /health, /metrics and /metrics/summary.

In threads of its own, used by a probe now and then; the standard library's server is enough.
"""

import contextlib
import json
import logging
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from mooncake.errors import ConfigError
from mooncake.rpc.figures import exposition, summary
from mooncake.rpc.segment_messages import Family
from mooncake.security.anteroom import Anteroom
from mooncake.security.secret import BEARER_MISSING, read_secret
from mooncake.security.tls_files import CLIENT_HELLO, PLAIN_HTTP, check_files, speaks_tls

logger = logging.getLogger("mooncake.client")

_LOOK = 0.1  # seconds that `close` may take
SILENCE = 5.0  # seconds after which a connection that asks nothing is closed
MOST = 64  # connections


class ClientHttpServer:
    """`alive` says whether the master answers; `families` gives the metrics.  `flag` sets the port, for messages."""

    def __init__(
        self, port: int, alive: Callable[[], bool], families: Callable[[], list[Family]], flag: str = "client_http_port"
    ) -> None:
        """Raises ConfigError if the port cannot be had."""

        secret = read_secret()
        check_files()

        class Handler(BaseHTTPRequestHandler):
            timeout = SILENCE

            def do_GET(self) -> None:
                try:
                    self._get(self.path.partition("?")[0])
                except OSError:
                    raise  # who asked is gone
                except Exception as error:
                    logger.exception("%s cannot be answered", self.path)
                    self._answer(500, "application/json", json.dumps({"error": f"{type(error).__name__}: {error}"}))

            def _get(self, path: str) -> None:
                told = self.headers.get("Authorization") or ""
                if path == "/health":
                    healthy = alive()
                    text = json.dumps({"status": "healthy" if healthy else "unhealthy", "code": 0 if healthy else 2})
                    self._answer(200 if healthy else 503, "application/json", text)
                elif secret is not None and not secret.is_told_by(told):
                    self._answer(401, "application/json", json.dumps({"error": BEARER_MISSING}))
                elif path == "/metrics":
                    self._answer(200, "text/plain; version=0.0.4; charset=utf-8", exposition(families()))
                elif path == "/metrics/summary":
                    self._answer(200, "text/plain; charset=utf-8", summary(families()))
                else:
                    text = '{"error": "not found; try /health, /metrics, /metrics/summary"}'
                    self._answer(404, "application/json", text)

            def _answer(self, status: int, kind: str, text: str) -> None:
                body = text.encode()
                self.send_response(status)
                if status == 401:
                    self.send_header("WWW-Authenticate", "Bearer")
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (the base class's name)
                pass

        try:
            self._server = _Server(("0.0.0.0", port), Handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"{flag}={port} cannot be listened on ({reason}); give a port that is free") from None
        self.port: int = self._server.server_address[1]
        threading.Thread(
            target=self._server.serve_forever, args=(_LOOK,), name="mooncake-client-http", daemon=True
        ).start()

    def close(self) -> None:
        """No request is answered any more; the port is free."""
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    """Each connection has a thread, and at most MOST may: when there are more, the one that has been there longest
    goes."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._anteroom = Anteroom(MOST)
        self._places = threading.BoundedSemaphore(2 * MOST)  # some of those that were told to go have not gone yet
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._places.acquire()
        visitor = _Visitor(request)
        visitor.ticket = self._anteroom.enter(visitor.push_out)
        try:
            threading.Thread(
                target=self._serve, args=(visitor, client_address), name="mooncake-client-http", daemon=True
            ).start()
        except RuntimeError:
            self._let_go(visitor)
            raise

    def _serve(self, visitor: "_Visitor", client_address: Any) -> None:
        try:
            visitor.stream.settimeout(SILENCE)
            if speaks_tls():
                visitor.speak_tls()
            self.finish_request(visitor.stream, client_address)
        except (OSError, ValueError):  # ConfigError is a ValueError
            self.handle_error(visitor.stream, client_address)
        finally:
            self._let_go(visitor)

    def _let_go(self, visitor: "_Visitor") -> None:
        self._anteroom.leave(visitor.ticket)
        self.shutdown_request(visitor.stream)
        self._places.release()

    def handle_error(self, request: object, client_address: object) -> None:
        logger.debug("a request from %s failed", client_address, exc_info=True)


class _Visitor:
    def __init__(self, stream: socket.socket) -> None:
        self.stream = stream
        self.ticket = 0

    def push_out(self) -> None:
        """Its thread notices."""
        with contextlib.suppress(OSError):
            self.stream.shutdown(socket.SHUT_RDWR)

    def speak_tls(self) -> None:
        """Raises OSError, ConfigError."""
        from mooncake.rpc.tls_socket import wrap_server

        if self.stream.recv(1, socket.MSG_PEEK) != CLIENT_HELLO:
            self.stream.sendall(PLAIN_HTTP)
            raise ConnectionError("it does not speak TLS")
        wrapped = wrap_server(self.stream)
        self.stream = wrapped
        wrapped.do_handshake()
