"""GET over HTTP with a limit on time and on size, and an error that says what was wrong in a few words."""

import http.client
import json
import time
from typing import Any
from urllib.parse import urlsplit

from mooncake.errors import ConfigError
from mooncake.security.https import cluster_context, outside_context

_PIECE = 64 << 10


class NoAnswerError(Exception):
    """The text goes after "not available: "."""


class StatusError(NoAnswerError):
    def __init__(self, status: int, reason: str) -> None:
        super().__init__(f"HTTP {status} {reason}".rstrip())
        self.status = status


def connect(url: str, limit: float, cluster: bool = False) -> http.client.HTTPConnection:
    """A connection that is still to be opened.  `cluster`: to one of the cluster's own servers, not vLLM's.  Raises
    NoAnswerError."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise NoAnswerError(f"{url} is not a URL; expected one such as http://127.0.0.1:8000")
    try:
        if parts.scheme == "http":
            return http.client.HTTPConnection(parts.hostname, parts.port, timeout=limit)
        context = cluster_context() if cluster else outside_context()
        return http.client.HTTPSConnection(parts.hostname, parts.port, timeout=limit, context=context)
    except ConfigError as error:
        raise NoAnswerError(str(error)) from None
    except (http.client.InvalidURL, ValueError) as error:
        raise NoAnswerError(f"{url} is not a URL: {error}") from None


def get(
    url: str, limit: float, most: int = 4 << 20, headers: dict[str, str] | None = None, cluster: bool = False
) -> str:
    """The body's first `most` bytes as text.  `cluster`: as in `connect`.

    Raises NoAnswerError, StatusError; within `limit` seconds."""
    parts = urlsplit(url)
    deadline = time.monotonic() + limit
    connection = connect(url, limit, cluster)
    try:
        target = f"{parts.path}?{parts.query}" if parts.query else parts.path or "/"
        connection.request("GET", target, headers=headers or {})
        answer = connection.getresponse()
        body = b""
        while len(body) < most and (piece := answer.read1(_PIECE)):
            body += piece
            if connection.sock:
                connection.sock.settimeout(max(deadline - time.monotonic(), 0.001))
    except TimeoutError:
        raise NoAnswerError(f"no answer within {limit:g} s") from None
    except OSError as error:
        raise NoAnswerError(error.strerror or str(error)) from None
    except http.client.HTTPException as error:
        raise NoAnswerError(f"what answers does not speak HTTP ({type(error).__name__})") from None
    finally:
        connection.close()
    if answer.status != 200:
        raise StatusError(answer.status, answer.reason)
    return body[:most].decode(errors="replace")


def get_json(url: str, limit: float, headers: dict[str, str] | None = None, cluster: bool = False) -> Any:
    """Raises NoAnswerError."""
    text = get(url, limit, headers=headers, cluster=cluster)
    try:
        return json.loads(text)
    except ValueError:
        raise NoAnswerError("the answer is not JSON") from None
