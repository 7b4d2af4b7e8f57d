"""An HTTP metadata server: `mooncake_http_metadata_server`, the master's own, or another program with that interface.

A connection a call: calls are rare, and nothing is left open across a fork or a restart of the server.  The standard
library's client is enough for that and is imported in milliseconds.  Servers of this package take two headers more than
the published interface has: If-Match makes a PUT or DELETE conditional (others ignore it, and for them our compare
and their change are two steps), and Mooncake-TTL lets an entry end by itself.
"""

import hashlib
import http.client
import ssl
from urllib.parse import quote, urlsplit

from mooncake.errors import ConfigError, MetadataError
from mooncake.security.secret import authorization
from mooncake.transfer.metadata.base import LARGEST_VALUE, MetadataBackend

CONNECT_LIMIT, CALL_LIMIT = 1.5, 3.0  # seconds
_BROKEN = (OSError, http.client.HTTPException, ValueError)


class HttpBackend(MetadataBackend):
    def __init__(self, url: str, ttl: float) -> None:
        """Connects to nothing yet.  Raises ConfigError."""
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError:
            host = None
        if not host or parts.query or parts.fragment or "@" in parts.netloc:
            raise ConfigError(
                f"metadata server {url!r} is not an address; expected http://HOST:PORT/metadata "
                "(no user, query or fragment)"
            )
        self._url = url
        self._ttl = f"{ttl:.0f}"
        self._address = (host, port or (443 if parts.scheme == "https" else 80))
        self._path = parts.path if parts.path not in ("", "/") else "/metadata"
        self._tls = _tls_context() if parts.scheme == "https" else None

    def get(self, key: str) -> bytes | None:
        status, body = self._call("GET", key)
        if status == http.client.NOT_FOUND:
            return None
        self._expect_ok(status, body)
        return body

    def put(self, key: str, value: bytes) -> None:
        self._expect_ok(*self._call("PUT", key, value))

    def replace(self, key: str, former: bytes | None, value: bytes) -> bool:
        if former is not None and not self.remove(key, former):
            return False
        status, body = self._call("PUT", key, value)
        if status == http.client.BAD_REQUEST:  # taken; by ourselves, if an earlier answer was lost
            return self.get(key) == value
        self._expect_ok(status, body)
        return True

    def renew(self, key: str, value: bytes) -> bool:
        status, body = self._call("PUT", key, value, {"If-Match": entity_tag(value)})
        if status == http.client.PRECONDITION_FAILED:
            return False
        if status == http.client.BAD_REQUEST:  # a server that never lets an address be written again
            return self.get(key) == value
        self._expect_ok(status, body)
        return True

    def remove(self, key: str, value: bytes) -> bool:
        if self.get(key) != value:
            return False
        status, body = self._call("DELETE", key, headers={"If-Match": entity_tag(value)})
        if status in (http.client.NOT_FOUND, http.client.PRECONDITION_FAILED):
            return False
        self._expect_ok(status, body)
        return True

    def _call(
        self, method: str, key: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, bytes]:
        """Status and body of the answer."""
        host, port = self._address
        headers = {"Connection": "close", **authorization(), **(headers or {})}
        if body is not None:
            headers |= {"Content-Type": "application/json", "Mooncake-TTL": self._ttl}
        if self._tls is None:
            connection = http.client.HTTPConnection(host, port, timeout=CONNECT_LIMIT)
        else:
            connection = http.client.HTTPSConnection(host, port, timeout=CONNECT_LIMIT, context=self._tls)
        try:
            connection.connect()
            connection.sock.settimeout(CALL_LIMIT)
            connection.request(method, f"{self._path}?key={quote(key, safe='')}", body, headers)
            answer = connection.getresponse()
            content = answer.read(LARGEST_VALUE + 1)
        except _BROKEN as error:
            raise MetadataError(f"the metadata server at {self._url} cannot be reached ({_reason(error)})") from error
        finally:
            connection.close()
        if len(content) > LARGEST_VALUE:
            raise MetadataError(f"the metadata server at {self._url} holds more than {LARGEST_VALUE} bytes for {key}")
        return answer.status, content

    def _expect_ok(self, status: int, body: bytes) -> None:
        if status != http.client.OK:
            text = body[:100].decode(errors="replace").strip()
            raise MetadataError(f"the metadata server at {self._url} answered {status} ({text})")


def entity_tag(value: bytes) -> str:
    """What names a value in If-Match and ETag headers."""
    return f'"{hashlib.sha256(value).hexdigest()[:32]}"'


def _tls_context() -> ssl.SSLContext:
    from mooncake.security.https import cluster_context

    return cluster_context()


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else "") or str(error) or type(error).__name__
