"""Puts the scope of whoever asks before every key and group that a request names.

The one place where a request's keys become the directory's: a message kind that names keys must be in the table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mooncake.rpc import messages as m
from mooncake.rpc import task_messages as t
from mooncake.rpc.message import Message
from mooncake.rpc.record_messages import Damaged


def _keys(request: Any, scope: str) -> None:
    request.keys = [scope + key if key else key for key in request.keys]


def _key(request: Any, scope: str) -> None:
    request.key = scope + request.key


def _put(request: m.PutStart, scope: str) -> None:
    _keys(request, scope)
    options = request.options
    if options is not None and options.groups:
        options.groups = [scope + group if group else group for group in options.groups]


def _heads(request: m.Prefix, scope: str) -> None:
    for need in request.needs:
        need.heads = [scope + head for head in need.heads]


_SCOPE: dict[type[Message], Callable[[Any, str], None]] = {
    m.Exist: _keys,
    m.Prefix: _heads,
    m.GetStart: _keys,
    Damaged: _keys,
    m.Query: _keys,
    m.PutStart: _put,
    m.Remove: _keys,
    t.ReplicaClear: _keys,
    t.CopyTask: _key,
    t.MoveTask: _key,
}


def scope_request(request: Message, scope: str) -> None:
    """Turn the keys of `request` into the directory's, in place."""
    change = _SCOPE.get(type(request))
    if change is not None:
        change(request, scope)
