"""Which headers go from client to engine and back: all but those that belong to one connection."""

from multidict import CIMultiDict, CIMultiDictProxy

REQUEST_ID = "X-Request-Id"

_CONNECTION = {
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
    "transfer-encoding", "upgrade", "content-length", "x-request-id",
}  # fmt: skip
_NOT_TO_ENGINE = _CONNECTION | {"host", "content-type", "accept-encoding", "expect", "x-data-parallel-rank"}
_NOT_TO_CLIENT = _CONNECTION | {"date", "server", "content-encoding"}


def to_engine(headers: CIMultiDictProxy[str], request_id: str) -> CIMultiDict[str]:
    passed = CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in _NOT_TO_ENGINE)
    passed["Content-Type"] = "application/json"
    passed[REQUEST_ID] = request_id
    return passed


def to_client(headers: CIMultiDictProxy[str], request_id: str) -> CIMultiDict[str]:
    passed = CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in _NOT_TO_CLIENT)
    passed[REQUEST_ID] = request_id
    return passed
