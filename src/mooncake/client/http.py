"""The client's own small HTTP server: /health, /metrics and /metrics/summary, when setup asks for it.

In a thread of the engine process, used by a probe now and then; the standard library's server is enough.
"""

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class ClientHttpServer:
    """`alive` says whether the master answers; `moved` gives bytes by transport."""

    def __init__(self, port: int, alive: Callable[[], bool], moved: Callable[[], dict[str, int]]) -> None:
        """Raises OSError if the port cannot be had."""

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                if path == "/health":
                    healthy = alive()
                    text = json.dumps({"status": "healthy" if healthy else "unhealthy", "code": 0 if healthy else 2})
                    self._answer(200 if healthy else 503, "application/json", text)
                elif path == "/metrics":
                    self._answer(200, "text/plain; version=0.0.4", _exposition(moved()))
                elif path == "/metrics/summary":
                    parts = [f"{name}: {count} bytes" for name, count in moved().items()]
                    self._answer(200, "text/plain", "Transferred " + " | ".join(parts) + "\n")
                else:
                    self._answer(404, "application/json", '{"error": "not found; try /health, /metrics"}')

            def _answer(self, status: int, kind: str, text: str) -> None:
                body = text.encode()
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (the base class's name)
                pass

        self._server = ThreadingHTTPServer(("0.0.0.0", port), Handler)
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, name="mooncake-client-http", daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _exposition(moved: dict[str, int]) -> str:
    lines = [
        "# HELP mooncake_client_transferred_bytes_total Bytes moved by this client, by transport.",
        "# TYPE mooncake_client_transferred_bytes_total counter",
        *(f'mooncake_client_transferred_bytes_total{{transport="{name}"}} {count}' for name, count in moved.items()),
    ]
    return "\n".join(lines) + "\n"
