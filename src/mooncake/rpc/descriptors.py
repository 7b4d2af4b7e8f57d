"""How many connections a process may hold."""

import contextlib
import resource


def allow_many() -> None:
    """Raise this process's limit of open descriptors as far as it may be: the usual 1,024 are fewer than the
    connections of a cluster's engines."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
