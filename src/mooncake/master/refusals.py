"""Failures as a master says them on its port."""

from __future__ import annotations

import logging

import msgspec

from mooncake.errors import ErrorCode, StoreError
from mooncake.rpc import frame
from mooncake.rpc.messages import Failure, encode

log = logging.getLogger("mooncake.master")


def refusal(got: frame.Frame, error: Exception) -> bytes | None:
    """What to answer to a request that ended with `error`; None if nobody waits for it."""
    if isinstance(error, StoreError):
        code, text = error.code, str(error)
    elif isinstance(error, msgspec.MsgspecError):
        code, text = ErrorCode.INVALID_PARAMS, f"message of kind {got.kind} cannot be decoded: {error}"
    else:
        log.error("request of kind %d failed", got.kind, exc_info=error)
        code, text = ErrorCode.INTERNAL_ERROR, f"{type(error).__name__}: {error}"
    return None if got.flags & frame.ONE_WAY else failed(got, code, text)


def failed(got: frame.Frame, code: ErrorCode, text: str) -> bytes:
    flags = frame.REPLY | frame.FAILED
    return frame.pack(got.kind, flags, got.request_id, encode(Failure(int(code), text)))
