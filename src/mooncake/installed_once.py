"""Guards against two Mooncakes in one environment: this package and the C++ wheel share the import name.

Python would mix the two (our packages, their leftover modules), so whoever imports the store or starts a command is
told how to keep one of them.
"""

import json
import os
import re
import shlex

import mooncake

_CPP_LIBRARY = re.compile(r"(store|engine)(\.[^/]*)?\.so")
_CPP_DISTRIBUTION = "mooncake-transfer-engine"
_OUR_DISTRIBUTION = "mooncake-py"


def refuse_if_cpp_installed() -> None:
    """Raise ImportError with one sentence if the C++ wheel's libraries lie beside our packages."""
    for directory in mooncake.__path__:
        try:
            names = os.listdir(directory)
        except OSError:
            continue
        for name in sorted(names):
            if _CPP_LIBRARY.fullmatch(name):
                raise ImportError(_how_to_choose(os.path.join(directory, name)))


def _how_to_choose(library: str) -> str:
    cpp = _cpp_distribution()
    return (
        f"{_OUR_DISTRIBUTION} and the C++ wheel {cpp} are both installed here (found {library}) and would be mixed: "
        f"to use {_OUR_DISTRIBUTION}, run `pip uninstall -y {cpp} && "
        f"pip install --force-reinstall --no-deps {_our_source()}`; "
        f"to use the C++ wheel, run `pip uninstall -y {_OUR_DISTRIBUTION} && "
        f"pip install --force-reinstall --no-deps {cpp}`."
    )


def _our_source() -> str:
    """What pip must be given to install this package again: where it was installed from, if pip wrote that down."""
    from importlib.metadata import PackageNotFoundError, distribution
    from urllib.parse import unquote, urlsplit

    try:
        origin = json.loads(distribution(_OUR_DISTRIBUTION).read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        return _OUR_DISTRIBUTION
    url = urlsplit(str(origin.get("url", "")))
    if url.scheme != "file":
        return _OUR_DISTRIBUTION
    editable = "--editable " if origin.get("dir_info", {}).get("editable") else ""
    return editable + shlex.quote(unquote(url.path))


def _cpp_distribution() -> str:
    """The installed C++ distribution's name; there are several builds (CUDA, non-CUDA, ...)."""
    from importlib.metadata import distributions

    for distribution in distributions():
        name = str(distribution.metadata["Name"] or "")
        if name.lower().replace("_", "-").startswith(_CPP_DISTRIBUTION):
            return name.replace("_", "-")
    return _CPP_DISTRIBUTION
