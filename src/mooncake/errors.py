"""The one list of result codes, and the exceptions used inside.

    MooncakeError
    ├── ConfigError         a user's setting is wrong; its text says which, what was expected, what to do
    ├── MetadataError       the metadata service cannot be reached, or what it holds cannot be used
    │   └── NameTakenError      a living process has the name already
    ├── StoreError          an operation ended with a documented code (`.code`)
    │   ├── Unavailable     the master or a peer cannot be reached (-900)
    │   ├── TimedOut        no answer within the limit (-901)
    │   └── UnsoundError    what cannot be pieces of memory (-600)
    └── TransferError       bytes could not be moved (-800)
        └── TransferTimedOut    not within the time limit

The drop-in surface (`mooncake.store`) turns every one of them into a code; nothing else crosses it.
"""

from enum import IntEnum


class ErrorCode(IntEnum):
    OK = 0
    INTERNAL_ERROR = -1
    BUFFER_OVERFLOW = -10
    SHARD_INDEX_OUT_OF_RANGE = -100
    SEGMENT_NOT_FOUND = -101
    SEGMENT_ALREADY_EXISTS = -102
    CLIENT_NOT_FOUND = -103
    NO_AVAILABLE_HANDLE = -200
    INVALID_VERSION = -300
    INVALID_KEY = -400
    WRITE_FAIL = -500
    INVALID_PARAMS = -600
    ILLEGAL_CLIENT = -601
    INVALID_WRITE = -700
    INVALID_READ = -701
    INVALID_REPLICA = -702
    REPLICA_IS_NOT_READY = -703
    OBJECT_NOT_FOUND = -704
    OBJECT_ALREADY_EXISTS = -705
    OBJECT_HAS_LEASE = -706
    LEASE_EXPIRED = -707
    OBJECT_HAS_REPLICATION_TASK = -708
    OBJECT_NO_REPLICATION_TASK = -709
    REPLICA_NOT_FOUND = -710
    REPLICA_ALREADY_EXISTS = -711
    REPLICA_IS_GONE = -712
    REPLICA_NOT_IN_LOCAL_MEMORY = -713
    OBJECT_REPLICA_BUSY = -714
    TRANSFER_FAIL = -800
    CHECKSUM_MISMATCH = -801
    RPC_FAIL = -900
    RPC_TIMEOUT = -901
    UNAVAILABLE_IN_CURRENT_STATUS = -1010
    UNAVAILABLE_IN_CURRENT_MODE = -1011
    NOT_SUPPORTED = -1012
    FILE_NOT_FOUND = -1100
    TASK_NOT_FOUND = -1400
    TASK_PENDING_LIMIT_EXCEEDED = -1401
    JOB_NOT_FOUND = -1402
    TENANT_QUOTA_EXCEEDED = -1700
    TENANT_NOT_REGISTERED = -1701
    TENANT_NOT_EMPTY = -1702


class MooncakeError(Exception):
    """Base of every error raised inside this package."""


class ConfigError(MooncakeError, ValueError):
    """A setting is wrong.  The text is one sentence for the user."""


class MetadataError(MooncakeError):
    """The metadata service cannot be reached, or what it holds cannot be used.  The text is one sentence."""


class NameTakenError(MetadataError):
    """A living process has published itself under the name."""


class StoreError(MooncakeError):
    """An operation ended with a documented code."""

    def __init__(self, code: ErrorCode, message: str = "") -> None:
        super().__init__(message or code.name)
        self.code = code


class Unavailable(StoreError):
    """The other side cannot be reached."""

    def __init__(self, message: str) -> None:
        super().__init__(ErrorCode.RPC_FAIL, message)


class TimedOut(StoreError):
    """No answer within the limit."""

    def __init__(self, message: str) -> None:
        super().__init__(ErrorCode.RPC_FAIL, message)


class UnsoundError(StoreError):
    """Addresses or lengths that cannot be pieces of memory."""

    def __init__(self) -> None:
        super().__init__(ErrorCode.INVALID_PARAMS)


class TransferError(StoreError):
    """Bytes could not be moved."""

    def __init__(self, message: str) -> None:
        super().__init__(ErrorCode.TRANSFER_FAIL, message)


class TransferTimedOut(TransferError):
    """Bytes were not moved within the time limit."""
