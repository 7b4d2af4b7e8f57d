"""What can go wrong between the proxy and an instance.

    UpstreamError
    ├── Refused       its host refuses a connection: nobody is there
    ├── Unreached     no connection within the limit: nobody is there, or everybody is too busy
    ├── Broken        the connection was lost, or a limit of time ran out, after the request was sent
    │   └── Reported  ... in its stream: an error event
    ├── NoInstance    nobody is there to ask
    ├── PrefillLost   the decode half was given up because the prefill half it waited for is lost
    └── Answered      the instance answered with an error status

None of them reaches a client as it is: `routing` retries, resumes, or turns it into one error answer.
"""

import msgspec
from aiohttp import web
from multidict import CIMultiDict

JSON = "application/json"


class UpstreamError(Exception):
    def __init__(self, why: str, status: int = 502) -> None:
        super().__init__(why)
        self.why = why
        self.status = status  # what a client is told if nothing else helps


class Refused(UpstreamError):
    pass


class Unreached(UpstreamError):
    pass


class Broken(UpstreamError):
    pass


class Reported(Broken):
    def __init__(self, event: bytes) -> None:
        """`event`: the engine's own error event."""
        super().__init__("the engine ended the stream with an error", _status_in(event))
        self.event = event


class NoInstance(UpstreamError):
    pass


class PrefillLost(UpstreamError):
    pass


class Answered(UpstreamError):
    def __init__(self, status: int, headers: CIMultiDict[str], body: bytes) -> None:
        super().__init__(f"answered with status {status}", status)
        self.headers = headers
        self.body = body

    def response(self) -> web.Response:
        """The same answer for the client."""
        return web.Response(status=self.status, headers=self.headers, body=self.body)


_TYPES = {404: "NotFoundError", 415: "UnsupportedMediaTypeError", 503: "ServiceUnavailableError"}


def error_content(status: int, message: str) -> bytes:
    """The body of an error, in the form of OpenAI's API."""
    kind = _TYPES.get(status, "InternalServerError" if status >= 500 else "BadRequestError")
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": None, "code": status}})


def _status_in(event: bytes) -> int:
    """The status in an error event; 500 if there is none."""
    try:
        return int(msgspec.json.decode(event[5:])["error"]["code"])
    except (msgspec.DecodeError, LookupError, TypeError, ValueError):
        return 500


def error_response(status: int, message: str) -> web.Response:
    return web.Response(status=status, body=error_content(status, message), content_type=JSON)


def error_event(status: int, message: str) -> bytes:
    """The last event of a stream that could not be finished."""
    return b"data: " + error_content(status, message) + b"\n\n"
