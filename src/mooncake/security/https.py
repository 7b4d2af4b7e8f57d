"""How this process asks HTTPS servers: of the cluster, and of others."""

import ssl

from mooncake.security.tls import contexts
from mooncake.security.tls_files import speaks_tls


def cluster_context() -> ssl.SSLContext:
    """For the cluster's own servers, or, where this process has no TLS set, for any.  Raises ConfigError."""
    found = contexts()
    return ssl.create_default_context() if found is None else found.client


def aiohttp_tls() -> ssl.SSLContext | bool:
    """As `cluster_context`, for aiohttp's `ssl=`.  Raises ConfigError."""
    return cluster_context() if speaks_tls() else True


def outside_context() -> ssl.SSLContext:
    """For servers of any authority, the cluster's among them: they must be who they are asked for, and are shown no
    certificate.  Raises ConfigError."""
    context = ssl.create_default_context()
    found = contexts()
    if found is not None:
        for certificate in found.client.get_ca_certs(binary_form=True):
            context.load_verify_locations(cadata=certificate)
    return context
