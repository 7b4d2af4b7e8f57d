"""The address behind a peer's name.  Asked when a peer is first used, and when it is not where it was."""

from mooncake.errors import MetadataError, TransferError
from mooncake.transfer.metadata.base import MetadataBackend
from mooncake.transfer.metadata.entries import Address, address_key, decode_address


class Names:
    """What a name stands for.  Without a back end it is the address itself."""

    def __init__(self, backend: MetadataBackend | None, own_name: str, own: Address) -> None:
        self._backend = backend
        self._own_name, self._own = own_name, own

    def resolve(self, name: str) -> tuple[str, int]:
        """("host:port", instance or 0 for whoever is there).  Raises TransferError whose cause is a MetadataError."""
        if self._backend is None:
            return name, 0
        if name == self._own_name:
            return self._own.text, self._own.instance
        try:
            value = self._backend.get(address_key(name))
            if value is None:
                raise MetadataError(f"the metadata server knows no {name!r}")
            address = decode_address(name, value)
        except MetadataError as error:
            raise TransferError(str(error)) from error
        return address.text, address.instance
