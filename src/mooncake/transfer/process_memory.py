"""Bytes from and to any address of this process, checked by the kernel: a bad address is an error and not a crash."""

import os

from mooncake.transfer.pieces import pieces_of, read_file, write_file


def write_at(address: int, data: bytes) -> None:
    """Raises TransferError."""
    fd = os.memfd_create("mooncake-bytes", os.MFD_CLOEXEC)
    try:
        os.pwrite(fd, data, 0)
        read_file(fd, 0, pieces_of([address], [len(data)]))
    finally:
        os.close(fd)


def read_at(address: int, length: int) -> bytes:
    """Raises TransferError."""
    fd = os.memfd_create("mooncake-bytes", os.MFD_CLOEXEC)
    try:
        write_file(fd, 0, pieces_of([address], [length]))
        return os.pread(fd, length, 0)
    finally:
        os.close(fd)
