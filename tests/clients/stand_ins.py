"""Stand-ins for packages that a client imports and never calls here, because they need a GPU: whatever is imported from
them, it is an empty class or a module of such.

Enough for a module to be imported whose kernels are never called.  A class that stands for a decorator gives
back the function that it decorates.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Iterable, Sequence


class _Anything(type):
    def __getattr__(cls, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return _anything(name)

    def __getitem__(cls, _):
        return cls

    def __call__(cls, *args, **kwargs):
        decorates = len(args) == 1 and callable(args[0]) and not kwargs
        return args[0] if decorates else cls


def _anything(name: str) -> _Anything:
    return _Anything(name, (), {})


class _Module(types.ModuleType):
    __version__ = "99.0"

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, _anything(name))
        return getattr(self, name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, packages: Iterable[str]) -> None:
        self._packages = frozenset(packages)

    def find_spec(self, fullname: str, path: Sequence[str] | None, target=None):
        if fullname.partition(".")[0] not in self._packages:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def install(*packages: str) -> None:
    """For those of `packages` that are not installed."""
    sys.meta_path.append(_Finder(packages))
