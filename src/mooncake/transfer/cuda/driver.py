"""The CUDA driver, by ctypes: only what is used here, with errors as exceptions.

Two ways of calling: `quick` functions keep the interpreter lock, because they take a microsecond and winning the lock
back beside a busy thread may cost 5 ms; the others release it, because they may take long.

The driver is never initialised from here: who has device memory has done that, and a process that is going to fork
must not have it done.

Everything that runs in a process's primary context is bracketed by `Context`, which leaves the caller's own context,
and its mode of stream capture, as they were.
"""

import ctypes
import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from mooncake.errors import TransferError

LIBRARY = "libcuda.so.1"
HOST, DEVICE = 1, 2  # memory types
HANDLE_SIZE = 64  # bytes of an IPC handle
_RTLD_NOLOAD = 4
_loaded = False

_MEMORY_TYPE, _BUFFER_ID, _IS_MANAGED, _DEVICE_ORDINAL, _RANGE_START, _RANGE_SIZE = 2, 7, 8, 9, 11, 12
_PORTABLE, _DEVICE_MAP = 1, 2
_RELAXED = 2
_NON_BLOCKING = 1
_BLOCKING_SYNC, _DISABLE_TIMING = 1, 2
_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    """Passed by value."""

    _fields_ = (("bytes", ctypes.c_byte * HANDLE_SIZE),)


_u32, _u64, _size, _pointer, _int = ctypes.c_uint, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int
_SIGNATURES: dict[str, list[Any]] = {
    "cuGetErrorName": [_int, _pointer],
    "cuPointerGetAttributes": [_u32, _pointer, _pointer, _u64],
    "cuDeviceGet": [_pointer, _int],
    "cuDeviceGetCount": [_pointer],
    "cuDeviceGetUuid": [_pointer, _int],
    "cuDevicePrimaryCtxRetain": [_pointer, _int],
    "cuCtxPushCurrent_v2": [_pointer],
    "cuCtxPopCurrent_v2": [_pointer],
    "cuCtxGetStreamPriorityRange": [_pointer, _pointer],
    "cuThreadExchangeStreamCaptureMode": [_pointer],
    "cuStreamCreateWithPriority": [_pointer, _u32, _int],
    "cuStreamWaitEvent": [_pointer, _pointer, _u32],
    "cuEventCreate": [_pointer, _u32],
    "cuEventRecord": [_pointer, _pointer],
    "cuEventSynchronize": [_pointer],
    "cuMemAlloc_v2": [_pointer, _size],
    "cuMemHostAlloc": [_pointer, _size, _u32],
    "cuMemHostRegister_v2": [_u64, _size, _u32],
    "cuMemHostUnregister": [_u64],
    "cuMemcpyHtoDAsync_v2": [_u64, _u64, _size, _pointer],
    "cuMemcpyDtoHAsync_v2": [_u64, _u64, _size, _pointer],
    "cuMemcpyDtoDAsync_v2": [_u64, _u64, _size, _pointer],
    "cuModuleLoadData": [_pointer, ctypes.c_char_p],
    "cuModuleGetFunction": [_pointer, _pointer, ctypes.c_char_p],
    "cuLaunchKernel": [_pointer, _u32, _u32, _u32, _u32, _u32, _u32, _u32, _pointer, _pointer, _pointer],
    "cuIpcGetMemHandle": [_pointer, _u64],
    "cuIpcOpenMemHandle_v2": [_pointer, _Handle, _u32],
    "cuIpcCloseMemHandle": [_u64],
}  # fmt: skip
_WANTED = (_int * 6)(_MEMORY_TYPE, _IS_MANAGED, _DEVICE_ORDINAL, _RANGE_START, _RANGE_SIZE, _BUFFER_ID)
_QUICK = {
    "cuPointerGetAttributes",
    "cuCtxPushCurrent_v2",
    "cuCtxPopCurrent_v2",
    "cuThreadExchangeStreamCaptureMode",
    "cuEventRecord",
    "cuStreamWaitEvent",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyDtoDAsync_v2",
    "cuLaunchKernel",
}


class CudaError(TransferError):
    """A driver function failed."""

    def __init__(self, function: str, code: int) -> None:
        super().__init__(f"{function}: {_name_of(code)}")
        self.cuda_code = code


class Range(NamedTuple):
    """A device allocation: on which GPU (by this process's count), where, and a number that no other one gets."""

    device: int
    base: int
    end: int
    number: int


class _Functions:
    """The loaded library."""

    def __init__(self) -> None:
        waiting, quick = ctypes.CDLL(LIBRARY), ctypes.PyDLL(LIBRARY)
        for name, arguments in _SIGNATURES.items():
            function = getattr(quick if name in _QUICK else waiting, name)
            function.argtypes, function.restype = arguments, _int
            setattr(self, name, function)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{name} is not declared in {__name__}")


@functools.cache
def _functions() -> _Functions:
    return _Functions()


def is_loaded() -> bool:
    """Whether this process has loaded the driver; if not, no address of it is a device's."""
    global _loaded
    if not _loaded:
        try:
            ctypes.CDLL(LIBRARY, mode=os.RTLD_NOW | _RTLD_NOLOAD)
        except OSError:
            return False
        _loaded = True
    return True


def call(name: str, *arguments: Any) -> None:
    """Raises CudaError."""
    code = getattr(_functions(), name)(*arguments)
    if code:
        raise CudaError(name, code)


def range_of(address: int) -> Range | None:
    """The device allocation that holds an address; None if it is host memory, or no memory that CUDA knows."""
    kind, managed, ordinal = _u32(), _u32(), _int()
    start, size, number = _u64(), _size(), _u64()
    values = (kind, managed, ordinal, start, size, number)
    places = (_pointer * len(values))(*(ctypes.addressof(value) for value in values))
    if _functions().cuPointerGetAttributes(len(values), _WANTED, places, address):
        return None
    if kind.value != DEVICE or managed.value or not size.value:
        return None
    return Range(ordinal.value, start.value, start.value + size.value, number.value)


def run_of(allocation: Range, end: int) -> Range:
    """The allocation and those of its GPU that follow without a gap, as far as `end` (memory made of many parts)."""
    while allocation.end < end:
        following = range_of(allocation.end)
        if following is None or following.device != allocation.device:
            break
        allocation = allocation._replace(end=following.end)
    return allocation


class Context:
    """The primary context of one GPU, which every library of a process shares."""

    def __init__(self, device: int) -> None:
        """Raises CudaError."""
        handle, context = _int(), _pointer()
        call("cuDeviceGet", ctypes.byref(handle), device)
        call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
        self._context = context

    @contextmanager
    def current(self) -> Iterator[None]:
        """Within this block the thread works in this context, and may allocate while others capture graphs."""
        mode = _int(_RELAXED)
        call("cuCtxPushCurrent_v2", self._context)
        try:
            call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
            try:
                yield
            finally:
                call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        finally:
            call("cuCtxPopCurrent_v2", ctypes.byref(_pointer()))


# What follows needs a current context.


def new_stream() -> Any:
    """One that waits for no other stream, and goes before those of ordinary priority."""
    least, greatest, stream = _int(), _int(), _pointer()
    call("cuCtxGetStreamPriorityRange", ctypes.byref(least), ctypes.byref(greatest))
    call("cuStreamCreateWithPriority", ctypes.byref(stream), _NON_BLOCKING, greatest)
    return stream


def new_event(sleeps: bool = False) -> Any:
    """`sleeps`: who waits for it sleeps instead of looking again and again."""
    event = _pointer()
    call("cuEventCreate", ctypes.byref(event), _DISABLE_TIMING | (_BLOCKING_SYNC if sleeps else 0))
    return event


def record(event: Any, stream: Any) -> None:
    """The event comes when all that the stream has to do now is done."""
    call("cuEventRecord", event, stream)


def wait_in(stream: Any, event: Any) -> None:
    """What is given to the stream from now on waits for the event."""
    call("cuStreamWaitEvent", stream, event, 0)


def wait(event: Any) -> None:
    """This thread waits for the event.  Raises CudaError if what came before it failed."""
    call("cuEventSynchronize", event)


def allocate(size: int) -> int:
    """Address of new device memory."""
    address = _u64()
    call("cuMemAlloc_v2", ctypes.byref(address), size)
    return address.value


def allocate_pinned(size: int) -> int:
    """Address of new host memory that GPUs can read and write."""
    address = _pointer()
    call("cuMemHostAlloc", ctypes.byref(address), size, _PORTABLE | _DEVICE_MAP)
    assert address.value
    return address.value


def pin(address: int, size: int) -> None:
    call("cuMemHostRegister_v2", address, size, _PORTABLE)


def unpin(address: int) -> None:
    call("cuMemHostUnregister", address)


def load_kernels(text: bytes, names: list[str]) -> list[Any]:
    """Functions of a module given as PTX."""
    module = _pointer()
    call("cuModuleLoadData", ctypes.byref(module), text)
    functions = []
    for name in names:
        function = _pointer()
        call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
        functions.append(function)
    return functions


def launch(
    function: Any, grid: tuple[int, int], threads: int, argument: ctypes.c_uint64 | ctypes.Structure, stream: Any
) -> None:
    """Of a kernel with one argument."""
    arguments = (_pointer * 1)(ctypes.addressof(argument))
    call("cuLaunchKernel", function, *grid, 1, threads, 1, 1, 0, stream, arguments, None)


def export(base: int) -> bytes:
    """The handle by which another process opens the allocation that begins at `base`."""
    handle = (ctypes.c_byte * HANDLE_SIZE)()
    call("cuIpcGetMemHandle", ctypes.byref(handle), base)
    return bytes(handle)


def open_exported(handle: bytes) -> int:
    """Where another process's allocation begins here."""
    address = _u64()
    call("cuIpcOpenMemHandle_v2", ctypes.byref(address), _Handle.from_buffer_copy(handle), _PEER_ACCESS)
    return address.value


def close_exported(address: int) -> None:
    call("cuIpcCloseMemHandle", address)


def ordinal_of(uuid: bytes) -> int | None:
    """Which of this process's GPUs that is; None if it may not use it."""
    count = _int()
    call("cuDeviceGetCount", ctypes.byref(count))
    return next((ordinal for ordinal in range(count.value) if uuid_of(ordinal) == uuid), None)


def uuid_of(ordinal: int) -> bytes:
    handle, uuid = _int(), (ctypes.c_byte * 16)()
    call("cuDeviceGet", ctypes.byref(handle), ordinal)
    call("cuDeviceGetUuid", ctypes.byref(uuid), handle)
    return bytes(uuid)


def _name_of(code: int) -> str:
    text = ctypes.c_char_p()
    try:
        ctypes.CDLL(LIBRARY).cuGetErrorName(code, ctypes.byref(text))
    except OSError:
        return f"CUDA error {code}"
    return text.value.decode() if text.value else f"CUDA error {code}"
