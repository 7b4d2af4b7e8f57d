"""Device memory of other processes of this host: handed out by its owner, mapped by who copies from or to it.

A registered region of device memory has a number; whoever wants to reach it asks its process once what is behind that
number (an IPC handle of the whole allocation), and from then on copies by itself, as with host memory.
"""

import threading

from mooncake.errors import TransferError
from mooncake.rpc.engine_messages import Exported
from mooncake.transfer.cuda import driver
from mooncake.transfer.cuda.device import device

HOST, NOT_EXPORTED = 0, -1  # kinds of regions that have no number


class Exports:
    """What this process has handed out.  Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers: dict[int, int] = {}  # the driver's number of an allocation → ours
        self._exported: dict[int, Exported] = {}

    def kind_of(self, base: int, end: int) -> int | None:
        """The kind of a range: HOST (as far as the driver knows), a number, NOT_EXPORTED; None if it is device memory
        only in part."""
        allocation = driver.range_of(base) if driver.is_loaded() else None
        if allocation is None:
            return HOST
        if allocation.end < end:
            return NOT_EXPORTED if driver.run_of(allocation, end).end >= end else None
        try:
            with device(allocation.device).context.current():
                handle = driver.export(allocation.base)
        except driver.CudaError:  # memory of pools and of virtual address ranges cannot be handed out so
            return NOT_EXPORTED
        with self._lock:
            number = self._numbers.setdefault(allocation.number, len(self._numbers) + 1)
            size, gpu = allocation.end - allocation.base, driver.uuid_of(allocation.device)
            self._exported[number] = Exported(number, allocation.base, size, gpu, handle)
        return number

    def list(self, numbers: list[int]) -> list[Exported]:
        """Those of them that there are."""
        with self._lock:
            return [self._exported[number] for number in numbers if number in self._exported]


class Import:
    """An allocation of another process, mapped here; or of this one."""

    def __init__(self, exported: Exported, here: bool, ordinal: int) -> None:
        """`here`: it is this process's own.  `ordinal`: the GPU that shall reach it.  Raises TransferError."""
        self._exported = exported
        self._here = here
        self.device = device(ordinal)
        self._address = exported.base
        if not here:
            with self.device.context.current():
                self._address = driver.open_exported(exported.handle)

    def shift(self) -> int:
        """To be added to an address there to have it here."""
        return self._address - self._exported.base

    def close(self) -> None:
        if not self._here:
            try:
                with self.device.context.current():
                    driver.close_exported(self._address)
            except driver.CudaError:
                pass  # its context has ended, and the mapping with it


def reaching_device(exported: Exported, near: int) -> int:
    """The GPU by which to reach it: `near` (that of our end of a copy), or its own if ours is host memory.  Raises
    TransferError where this process may not use that one."""
    if near >= 0:
        return near
    ordinal = driver.ordinal_of(exported.device)
    if ordinal is None:
        raise TransferError("the peer's GPU is not visible to this process")
    return ordinal
