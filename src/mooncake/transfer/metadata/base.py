"""What a metadata service must be able to do: small values by key, changed only if they are what we think they are."""

from abc import ABC, abstractmethod

LARGEST_VALUE = 1 << 20  # bytes; what is longer is not one of ours


class MetadataBackend(ABC):
    """Thread-safe.  Every method raises MetadataError, with a sentence, if the service cannot be used.

    What `put` and `replace` write lives for the seconds that the back end was made with, where the service can do
    that: `renew` begins them anew.
    """

    @abstractmethod
    def get(self, key: str) -> bytes | None:
        """The value, None if there is none."""

    @abstractmethod
    def put(self, key: str, value: bytes) -> None:
        """Write, whatever was there."""

    @abstractmethod
    def replace(self, key: str, former: bytes | None, value: bytes) -> bool:
        """Write if `former` is there (None: nothing); whether it was."""

    @abstractmethod
    def renew(self, key: str, value: bytes) -> bool:
        """Whether `value` is there; it lives on then."""

    @abstractmethod
    def remove(self, key: str, value: bytes) -> bool:
        """Delete if `value` is there; whether it was."""

    def close(self) -> None:
        """Let connections go; never waits."""
        return
