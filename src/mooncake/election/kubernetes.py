"""Elections by a Lease of Kubernetes (coordination.k8s.io/v1), asked of the API server over HTTP.

`holderIdentity` is the leader's address, an annotation his term.  The server forgets nothing by itself: a candidate
takes the lease over when he has seen it unchanged for its whole duration by his own clock.  Every write names the
`resourceVersion` it was decided on, so of two that were decided on the same one the second is refused.
"""

import http.client
import json
import os
import ssl
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from mooncake.election.base import LEASE_S, Election, Outcome, View, next_term
from mooncake.errors import ConfigError, MetadataError

SERVER = "MOONCAKE_K8S_API_SERVER"  # instead of the pod's own: `kubectl proxy`, say
CREDENTIALS = "MOONCAKE_K8S_CREDENTIALS"  # a folder with token, ca.crt and namespace
_CREDENTIALS = "/var/run/secrets/kubernetes.io/serviceaccount"
_TERM = "mooncake-store/term"
_REQUEST_S = 1.5
_MOST_BYTES = 1 << 20
_CONFLICT, _MISSING = 409, 404


class _Found(NamedTuple):
    lease: dict[str, Any]

    @property
    def version(self) -> str:
        return str(self.lease["metadata"].get("resourceVersion", ""))

    @property
    def view(self) -> View | None:
        holder = self.lease.get("spec", {}).get("holderIdentity")
        return View(str(holder), self.term) if holder else None

    @property
    def term(self) -> int:
        text = str((self.lease["metadata"].get("annotations") or {}).get(_TERM, ""))
        return int(text) if text.isdigit() else 0

    @property
    def duration_s(self) -> float:
        return float(self.lease.get("spec", {}).get("leaseDurationSeconds") or LEASE_S)


class LeaseElection(Election):
    def __init__(self, namespace: str, name: str) -> None:
        """Connects to nothing yet.  An empty namespace is the pod's own.  Raises ConfigError."""
        self._server = _ApiServer()
        namespace = namespace or self._server.namespace
        if not namespace:
            raise ConfigError(
                f"The lease {name} needs its namespace: expected k8s://NAMESPACE/LEASE (outside of a pod there is none "
                "to take by default)."
            )
        self._folder = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._namespace, self._name = namespace, name
        self._seen: tuple[str, float] = ("", 0.0)  # the last version of it, and since when

    def look(self) -> View | None:
        found = self._read()
        return found.view if found is not None else None

    def stand(self, address: str) -> Outcome:
        found = self._read()
        if found is not None and found.view is not None and not self._has_expired(found):
            return Outcome(found.view, False)
        view = View(address, next_term(found.term if found is not None else 0))
        now = _timestamp()
        spec = {"holderIdentity": address, "leaseDurationSeconds": round(LEASE_S), "acquireTime": now, "renewTime": now}
        if found is None:
            metadata = {"name": self._name, "namespace": self._namespace, "annotations": {_TERM: str(view.term)}}
            won = self._write("POST", self._folder, {"metadata": metadata, "spec": {**spec, "leaseTransitions": 0}})
        else:
            spec["leaseTransitions"] = int(found.lease.get("spec", {}).get("leaseTransitions") or 0) + 1
            won = self._replace(found, spec, view.term)
        return Outcome(view if won else None, won)

    def renew(self, view: View) -> bool:
        found = self._read()
        if found is None or found.view != view:
            return False
        return self._replace(found, {"renewTime": _timestamp()}, view.term)

    def resign(self, view: View, least_term: int) -> None:
        found = self._read()
        if found is not None and found.view == view:
            self._replace(found, {"holderIdentity": None, "renewTime": _timestamp()}, max(view.term, least_term))

    def _has_expired(self, found: _Found) -> bool:
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        if self._seen[0] != found.version:
            self._seen = (found.version, now)
        return now - self._seen[1] >= found.duration_s

    def _read(self) -> _Found | None:
        status, body = self._server.ask("GET", f"{self._folder}/{self._name}")
        if status == _MISSING:
            return None
        if status != 200 or not isinstance(body.get("metadata"), dict):
            raise self._refused("read", status, body)
        return _Found(body)

    def _replace(self, found: _Found, spec: dict[str, Any], term: int) -> bool:
        metadata = dict(found.lease["metadata"])
        metadata["annotations"] = {**(metadata.get("annotations") or {}), _TERM: str(term)}
        lease = {"metadata": metadata, "spec": {**found.lease.get("spec", {}), **spec}}
        return self._write("PUT", f"{self._folder}/{self._name}", lease)

    def _write(self, method: str, path: str, lease: dict[str, Any]) -> bool:
        """False if somebody else has written first."""
        lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", **lease}
        status, body = self._server.ask(method, path, lease)
        if status in (_CONFLICT, _MISSING):
            return False
        if status not in (200, 201):
            raise self._refused("written", status, body)
        return True

    def _refused(self, what: str, status: int, body: dict[str, Any]) -> MetadataError:
        reason = str(body.get("message", ""))[:200] or http.client.responses.get(status, "")
        advice = "; its service account needs get, create and update of leases" if status in (401, 403) else ""
        return MetadataError(
            f"lease {self._name} of namespace {self._namespace} cannot be {what}: {status} {reason}{advice}"
        )


class _ApiServer:
    """The pod's own API server with its service account, or the one that the environment names."""

    def __init__(self) -> None:
        """Raises ConfigError."""
        self._credentials = Path(os.environ.get(CREDENTIALS) or _CREDENTIALS)
        host, port = os.environ.get("KUBERNETES_SERVICE_HOST", ""), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        url = os.environ.get(SERVER, "") or (f"https://{f'[{host}]' if ':' in host else host}:{port}" if host else "")
        try:
            parts = urlsplit(url)
            self._host, self._port = parts.hostname or "", parts.port or (80 if parts.scheme == "http" else 443)
        except ValueError:
            self._host, self._port, parts = "", 0, urlsplit("")
        if not self._host or parts.scheme not in ("http", "https"):
            raise ConfigError(
                f"There is no API server of Kubernetes to ask: this is no pod (KUBERNETES_SERVICE_HOST is not set); "
                f"expected an http:// or https:// URL in {SERVER}."
            )
        self._is_secure = parts.scheme == "https"
        self._context: ssl.SSLContext | None = None

    @property
    def namespace(self) -> str:
        try:
            return (self._credentials / "namespace").read_text().strip()
        except OSError:
            return ""

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        """Status and decoded answer.  Raises MetadataError."""
        headers = {"Accept": "application/json", "Content-Type": "application/json"}
        connection: http.client.HTTPConnection | None = None
        try:
            connection = self._connection()
            try:  # read each time: tokens are replaced while a pod runs
                headers["Authorization"] = f"Bearer {(self._credentials / 'token').read_text().strip()}"
            except FileNotFoundError:
                pass
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            found = json.loads(answer.read(_MOST_BYTES) or b"{}")
            return answer.status, found if isinstance(found, dict) else {}
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = getattr(error, "strerror", None) or " ".join(str(error).split())[:200] or type(error).__name__
            raise MetadataError(f"the API server at {self._host}:{self._port} cannot be used ({reason})") from None
        finally:
            if connection is not None:
                connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        if not self._is_secure:
            return http.client.HTTPConnection(self._host, self._port, timeout=_REQUEST_S)
        if self._context is None:
            authority = self._credentials / "ca.crt"
            self._context = ssl.create_default_context(cafile=str(authority) if authority.exists() else None)
        return http.client.HTTPSConnection(self._host, self._port, timeout=_REQUEST_S, context=self._context)


def _timestamp() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
