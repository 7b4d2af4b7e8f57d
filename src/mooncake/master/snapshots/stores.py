"""Where snapshots lie: a folder, or whatever else holds named bytes.  Used by the child process alone."""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from pathlib import Path

SUFFIX = ".snapshot"
ASIDE = ".damaged"  # instead of SUFFIX: is not read again
_PART = ".part"


class Store(ABC):
    """Named bytes.  Whatever goes wrong is an OSError whose text says where and what.  `inner`: where they lie if only
    the list of their names is kept here."""

    inner: Store | None = None

    @abstractmethod
    def names(self) -> list[str]:
        """All there are, in the order of the alphabet, which is that of time; both suffixes."""

    @abstractmethod
    def read(self, name: str) -> bytes: ...

    @abstractmethod
    def write(self, name: str, raw: bytes) -> None:
        """All of it or nothing, and for good when this returns."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """No error if it is not there."""

    @abstractmethod
    def set_aside(self, name: str) -> None:
        """Give it the suffix ASIDE."""


class Folder(Store):
    def __init__(self, path: str, cluster: str) -> None:
        """Makes nothing yet."""
        self._path = Path(path) / cluster

    def names(self) -> list[str]:
        try:
            found = os.listdir(self._path)
        except FileNotFoundError:
            return []
        return sorted(name for name in found if name.endswith((SUFFIX, ASIDE)))

    def read(self, name: str) -> bytes:
        return (self._path / name).read_bytes()

    def write(self, name: str, raw: bytes) -> None:
        self._path.mkdir(parents=True, exist_ok=True)
        for left in self._path.glob("*" + _PART):  # of a child that was killed
            left.unlink(missing_ok=True)
        part = self._path / (name + _PART)
        try:
            with open(part, "wb") as file:
                file.write(raw)
                file.flush()
                os.fsync(file.fileno())
            os.rename(part, self._path / name)
        except BaseException:
            with contextlib.suppress(OSError):
                part.unlink()
            raise
        folder = os.open(self._path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def delete(self, name: str) -> None:
        (self._path / name).unlink(missing_ok=True)

    def set_aside(self, name: str) -> None:
        (self._path / name).rename(self._path / (name.removesuffix(SUFFIX) + ASIDE))


def keep_newest(store: Store, count: int, written: str) -> None:
    """Delete all but the newest `count`, and as many that were set aside; never `written`, which is the newest even if
    a clock that went back makes others look so."""
    names = [name for name in store.names() if name != written]
    for suffix, kept in ((SUFFIX, count - 1), (ASIDE, count)):
        found = [name for name in names if name.endswith(suffix)]
        for name in found[: max(0, len(found) - kept)]:
            store.delete(name)
