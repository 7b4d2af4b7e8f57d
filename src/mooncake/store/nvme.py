"""NVMe-over-fabrics segments, which this package has not: the calls are there and say so."""

from mooncake.errors import ErrorCode

NOT_SUPPORTED = int(ErrorCode.NOT_SUPPORTED)


class MooncakeDistributedNoFRegister:
    """Registers NVMe-oF namespaces with a pool; here every call gives NOT_SUPPORTED."""

    def real_register(
        self, endpoint: str, port: int, name: str, namespace: int, base: int, size: int, master: str
    ) -> int:
        """NOT_SUPPORTED."""
        return NOT_SUPPORTED

    def real_unregister_by_endpoint(self, endpoint: str, port: int, name: str, namespace: int, master: str) -> int:
        """NOT_SUPPORTED."""
        return NOT_SUPPORTED
