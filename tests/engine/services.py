"""Real metadata services for tests: each can be killed, stopped, started again empty, and asked directly."""

import http.server
import os
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from mooncake.transfer.metadata.backends import open_backend
from tests.processes import BIN, free_port, stop, wait_until

SERVERS = Path(__file__).parents[2] / ".cache" / "servers"
HOST = "127.0.0.1"
KINDS = ("http", "other-http", "master", "etcd", "redis")


class Service:
    """One metadata service on a free port.  `address` is what engines are told."""

    forgets = True  # whether entries of dead processes go by themselves

    def __init__(self, folder: Path, host: str = HOST, prefix: Sequence[str] = ()) -> None:
        """`prefix`: what comes before its command, as on another host."""
        self.folder, self.host, self._prefix = folder, host, list(prefix)
        self.port = free_port()
        self.process: subprocess.Popen | None = None
        self.start()

    @property
    def address(self) -> str:
        return f"http://{self.host}:{self.port}/metadata"

    def command(self) -> list[str]:
        raise NotImplementedError

    def start(self) -> None:
        self.process = subprocess.Popen(
            self._prefix + self.command(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **self.environment()},
        )
        wait_until(self.answers, 30, f"the port of {type(self).__name__}")

    def environment(self) -> dict[str, str]:
        return {}

    def answers(self) -> bool:
        assert self.process.poll() is None, "the service ended at once"
        with socket.socket() as s:
            s.settimeout(0.5)
            return s.connect_ex((self.host, self.port)) == 0 and self.serves()

    def serves(self) -> bool:
        return True

    def backend(self, ttl: float = 60):
        """Direct access, as an engine has it."""
        return open_backend(self.address, ttl)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def freeze(self) -> None:
        stop(self.process.pid)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        if self.process.poll() is None:
            self.thaw()
            self.kill()


class Http(Service):
    def command(self) -> list[str]:
        return [str(BIN / "mooncake_http_metadata_server"), f"--port={self.port}", f"--host={self.host}"]


class Master(Service):
    """The one inside the master."""

    def command(self) -> list[str]:
        self.rpc_port = free_port()
        return [
            str(BIN / "mooncake_master"),
            f"--rpc_port={self.rpc_port}",
            f"--rpc_address={HOST}",
            "--metrics_port=0",
            f"--metrics_host={HOST}",
            "--enable_http_metadata_server=true",
            f"--http_metadata_server_port={self.port}",
            f"--http_metadata_server_host={HOST}",
        ]


class Etcd(Service):
    lives = 0

    @property
    def address(self) -> str:
        return f"etcd://{self.host}:{self.port}"

    def command(self) -> list[str]:
        self.lives += 1
        client, peer = f"http://{self.host}:{self.port}", f"http://127.0.0.1:{free_port()}"
        return [
            server("etcd"),
            f"--data-dir={self.folder / f'etcd-{self.lives}'}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
        ]

    def environment(self) -> dict[str, str]:
        return {"ETCD_UNSUPPORTED_ARCH": "arm64"} if os.uname().machine == "aarch64" else {}

    def serves(self) -> bool:
        """It has elected itself."""
        try:
            self.backend().get("anything")
        except Exception:
            return False
        return True


class Redis(Service):
    @property
    def address(self) -> str:
        return f"redis://:a%20secret@{HOST}:{self.port}/3"

    def command(self) -> list[str]:
        options = {"port": self.port, "bind": HOST, "save": "", "appendonly": "no", "requirepass": "a secret"}
        return [
            server("redis-server"),
            *(word for name, value in options.items() for word in (f"--{name}", str(value))),
        ]

    def environment(self) -> dict[str, str]:
        return {"LD_LIBRARY_PATH": ":".join(map(str, (SERVERS / "root/usr/lib").glob("*-linux-gnu")))}


class OtherHttp(Service):
    """A server of another make, which has the published interface and nothing more: conditions and times to live are
    ignored, an address that is there is never overwritten."""

    forgets = False

    def start(self) -> None:
        entries: dict[str, bytes] = {}

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                self.answer(*((200, entries[self.key]) if self.key in entries else (404, b"metadata not found")))

            def do_PUT(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if "rpc_meta" in self.key and self.key in entries:
                    self.answer(400, b"duplicate")
                else:
                    entries[self.key] = body
                    self.answer(200, b"metadata updated")

            def do_DELETE(self):
                found = entries.pop(self.key, None) is not None
                self.answer(*((200, b"metadata deleted") if found else (404, b"metadata not found")))

            @property
            def key(self) -> str:
                return parse_qs(urlsplit(self.path).query)["key"][0]

            def answer(self, status: int, body: bytes) -> None:
                thawed.wait()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        self.thawed = thawed = threading.Event()
        thawed.set()
        self.server = http.server.ThreadingHTTPServer((HOST, self.port), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def kill(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def freeze(self) -> None:
        self.thawed.clear()

    def thaw(self) -> None:
        self.thawed.set()

    def close(self) -> None:
        self.thaw()
        self.kill()


EACH_KIND = [pytest.param(kind, marks=() if kind == "http" else pytest.mark.slow) for kind in KINDS]
_CLASSES = dict(zip(KINDS, (Http, OtherHttp, Master, Etcd, Redis), strict=True))


def start_service(
    kind: str, folder: Path, host: str = HOST, prefix: Sequence[str] = (), make: type[Service] | None = None
) -> Service:
    """Skips the test if the server of that kind cannot be had here."""
    command = {"etcd": "etcd", "redis": "redis-server"}.get(kind)
    if command and not server(command):
        try:
            reason = (SERVERS / "unavailable").read_text()
        except OSError:
            reason = "scripts/install fetches it"
        pytest.skip(f"there is no {command} here: {reason}")
    return (make or _CLASSES[kind])(folder, host, prefix)


def server(command: str) -> str:
    """Where it is, "" if nowhere: this system's, or what scripts/install has unpacked."""
    return shutil.which(command) or shutil.which(command, path=SERVERS / "root/usr/bin") or ""
