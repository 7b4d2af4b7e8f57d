"""A small API server of Kubernetes: Leases with resource versions, over real HTTP, kept or lost at will."""

import http.server
import json
import re
import threading

from tests.processes import free_port

_PATH = re.compile(r"/apis/coordination\.k8s\.io/v1/namespaces/([^/]+)/leases(?:/([^/]+))?")


class KubernetesApi:
    """`leases` by (namespace, name).  Who asks must tell `token`, if there is one."""

    def __init__(self, token: str = "") -> None:
        self.port = free_port()
        self.token = token
        self.leases: dict[tuple[str, str], dict] = {}
        self.version = 100
        self.lock = threading.Lock()
        self.thawed = threading.Event()
        self.thawed.set()
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        api = self

        class Handler(http.server.BaseHTTPRequestHandler):
            timeout = 10

            def do_GET(self):
                self.answer(*api.get(*self.place))

            def do_POST(self):
                self.answer(*api.post(*self.place, self.body))

            def do_PUT(self):
                self.answer(*api.put(*self.place, self.body))

            @property
            def place(self):
                return _PATH.fullmatch(self.path).groups()

            @property
            def body(self) -> dict:
                return json.loads(self.rfile.read(int(self.headers["Content-Length"])))

            def answer(self, status: int, content: dict) -> None:
                api.thawed.wait()
                if api.token and self.headers["Authorization"] != f"Bearer {api.token}":
                    status, content = 401, {"kind": "Status", "message": "Unauthorized"}
                body = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
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

    # -- leases

    def get(self, namespace: str, name: str) -> tuple[int, dict]:
        with self.lock:
            lease = self.leases.get((namespace, name))
            return (404, _status("not found")) if lease is None else (200, lease)

    def post(self, namespace: str, _: None, lease: dict) -> tuple[int, dict]:
        with self.lock:
            place = (namespace, lease["metadata"]["name"])
            if place in self.leases:
                return 409, _status("already exists")
            return 201, self._keep(place, lease)

    def put(self, namespace: str, name: str, lease: dict) -> tuple[int, dict]:
        with self.lock:
            known = self.leases.get((namespace, name))
            if known is None:
                return 404, _status("not found")
            if lease["metadata"].get("resourceVersion") != known["metadata"]["resourceVersion"]:
                return 409, _status("the object has been modified")
            return 200, self._keep((namespace, name), lease)

    def _keep(self, place: tuple[str, str], lease: dict) -> dict:
        assert (lease["apiVersion"], lease["kind"]) == ("coordination.k8s.io/v1", "Lease")
        self.version += 1
        lease["metadata"]["resourceVersion"] = str(self.version)
        self.leases[place] = lease
        return lease


def _status(message: str) -> dict:
    return {"kind": "Status", "status": "Failure", "message": message}
