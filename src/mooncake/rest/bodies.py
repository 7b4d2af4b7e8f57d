"""Requests' JSON bodies, and what is wrong with them."""

import asyncio
import json
from typing import Any

from aiohttp import web

from mooncake.config_text import shown

_MISSING: Any = object()
_LARGEST = (1 << 63) - 1
_LONG = 1 << 20  # bytes: bodies from here on are read by another thread
SHARED_MEMORY = "/dev/shm/"  # noqa: S108 (where the system has it)


class BadRequestError(Exception):
    """The request cannot be meant so: 400, with this text."""


class Body:
    """A JSON object.  null counts as not there."""

    def __init__(self, content: dict[str, Any]) -> None:
        self._content = content

    @classmethod
    async def of(cls, request: web.Request) -> "Body":
        """Raises BadRequestError."""
        try:
            data = await request.read()
            if len(data) < _LONG:
                content = json.loads(data)
            else:
                content = await asyncio.to_thread(json.loads, data)
        except (ValueError, RecursionError) as error:
            raise BadRequestError(f"The body must be JSON: {error}") from None
        if not isinstance(content, dict):
            raise BadRequestError(f"The body must be a JSON object, but is {shown(content)}")
        return cls(content)

    def get(self, name: str) -> Any:
        return self._content.get(name)

    def text(self, name: str, default: str = _MISSING) -> str:
        """Raises BadRequestError, also for what is not there without a default."""
        found: str = self._of_type(name, default, str, "text")
        return found

    def encoded(self, name: str) -> bytes:
        """Text as UTF-8."""
        try:
            return self.text(name).encode()
        except UnicodeEncodeError:
            raise BadRequestError(f"{name} has halves of surrogate pairs, which UTF-8 cannot hold") from None

    def whole(self, name: str, default: int = _MISSING, most: int = _LARGEST) -> int:
        """A whole number from 0 to `most`."""
        number: int = self._of_type(name, default, int, "a whole number")
        if not 0 <= number <= most:
            raise BadRequestError(f"{name} is {shown(number)}; expected a whole number from 0 to {most}")
        return number

    def segments(self) -> list[str]:
        """Of `segment_ids`, a list or one text."""
        found = self._content.get("segment_ids")
        if not found:
            raise BadRequestError("Missing segment_ids")
        some = [found] if isinstance(found, str) else found
        if not isinstance(some, list) or not all(isinstance(one, str) for one in some):
            raise BadRequestError(f"segment_ids is {shown(found)}; expected a list of texts")
        return some

    def shared_memory(self) -> str | None:
        """The path of the shared memory that `name` names; None if it cannot be a name."""
        name = self._content.get("name")
        if not isinstance(name, str):
            return None
        name = name.removeprefix("/")
        return None if name in ("", ".", "..") or "/" in name or "\0" in name else SHARED_MEMORY + name

    def _of_type(self, name: str, default: Any, wanted: type, called: str) -> Any:
        value = self._content.get(name)
        if value is None and default is not _MISSING:
            return default
        if type(value) is not wanted:
            raise BadRequestError(f"{name} is {shown(value)}; expected {called}")
        return value
