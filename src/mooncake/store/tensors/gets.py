"""Reading tensors: as torch's, in memory of their own or over header and data at an address (`_into`).

What is not there, is no tensor or does not fit is None.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mooncake.errors import ErrorCode
from mooncake.store.buffers import BufferHandle
from mooncake.store.gets import Gets
from mooncake.store.member import INVALID
from mooncake.store.tensors.header import SIZE
from mooncake.store.tensors.layout import tp_key
from mooncake.store.tensors.local import Local, from_handle, header_at, to_torch, torch_at
from mooncake.store.tensors.puts import TensorPuts

NO_FILE = int(ErrorCode.FILE_NOT_FOUND)


class TensorGets(TensorPuts, Gets):
    """Whole tensors, and single shards of one tensor axis (`_with_tp`)."""

    def get_tensor(self, key: str) -> Any:
        """The tensor, or None."""
        return self.batch_get_tensor([key])[0]

    def batch_get_tensor(self, keys: Sequence[str]) -> list[Any]:
        """As get_tensor, for each key."""
        return [to_torch(local) for local in self._locals(keys)]

    def get_tensor_with_tp(self, key: str, tp_rank: int = 0, tp_size: int = 1, split_dim: int = 0) -> Any:
        """The shard of one rank; with tp_size 1 the whole."""
        return self.get_tensor(tp_key(key, tp_rank, tp_size))

    def batch_get_tensor_with_tp(self, base_keys: Sequence[str], tp_rank: int = 0, tp_size: int = 1) -> list[Any]:
        """As get_tensor_with_tp, for each key."""
        return self.batch_get_tensor([tp_key(key, tp_rank, tp_size) for key in base_keys])

    # -- into addresses: header and data come to lie there, and the tensor is a view of them

    def get_tensor_into(self, key: str, buffer_ptr: int, size: int) -> Any:
        """Copy header and data to an address of host memory with room for `size` bytes; the tensor over them."""
        return self.batch_get_tensor_into([key], [buffer_ptr], [size])[0] if self._client is not None else None

    def batch_get_tensor_into(self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]) -> list[Any]:
        """As get_tensor_into, for each key; INVALID_PARAMS for each if the lists differ in length, or not set up."""
        if not len(keys) == len(buffer_ptrs) == len(sizes) or self._client is None:
            return [INVALID] * len(keys)
        found: list[Any] = []
        for address, got in zip(buffer_ptrs, self.batch_get_into(keys, buffer_ptrs, sizes), strict=True):
            header = header_at(address, got)
            found.append(None if header is None else torch_at(header, address + SIZE))
        return found

    def get_tensor_with_tp_into(
        self, key: str, buffer_ptr: int, size: int, tp_rank: int = 0, tp_size: int = 1, split_dim: int = 0
    ) -> Any:
        """As get_tensor_into, of the shard of one rank."""
        return self.get_tensor_into(tp_key(key, tp_rank, tp_size), buffer_ptr, size)

    def batch_get_tensor_with_tp_into(
        self,
        base_keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        tp_rank: int = 0,
        tp_size: int = 1,
    ) -> list[Any]:
        """As batch_get_tensor_into, of the shards of one rank."""
        keys = [tp_key(key, tp_rank, tp_size) for key in base_keys]
        return self.batch_get_tensor_into(keys, buffer_ptrs, sizes)

    def get_tensor_into_cuda(self, key: str, tensor: Any) -> int:
        """Copy the value's data into a tensor of the same type and size, on any device: 0, or a negative code.  Only on
        a store that was set up by setup_dummy; else INVALID_PARAMS, as in the C++ library."""
        return self.batch_get_tensor_into_cuda([key], [tensor])[0]

    def batch_get_tensor_into_cuda(self, keys: Sequence[str], tensors_list: Sequence[Any]) -> list[int]:
        """As get_tensor_into_cuda, a code a key."""
        client = self._client
        if client is None or not client.config.is_dummy or len(keys) != len(tensors_list):
            return [INVALID] * len(keys)
        codes = []
        for local, tensor in zip(self._locals(keys), tensors_list, strict=True):
            if local is None:
                codes.append(int(ErrorCode.OBJECT_NOT_FOUND))
                continue
            source = to_torch(local)
            fits = getattr(tensor, "dtype", None) == source.dtype and tensor.numel() == source.numel()
            if fits:
                tensor.copy_(source.reshape(tensor.shape))
            codes.append(0 if fits else INVALID)
        return codes

    # -- files

    def save_tensor_to_safetensor(self, key: str, file_name: str | None = None) -> int:
        """Write the tensor to a safetensors file, by default one named as the key: 0; FILE_NOT_FOUND if there is no
        such tensor; INVALID_PARAMS if the file cannot be written."""
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        tensor = self.get_tensor(key)
        if tensor is None:
            return NO_FILE
        try:
            save_file({key: tensor}, key if file_name is None else file_name)
        except (OSError, SafetensorError):
            return INVALID
        return 0

    def load_tensor_from_safetensor(self, key: str | None = None, file_name: str = "") -> Any:
        """The tensor of that name in a safetensors file, or else its first; it is also put under the key, by default
        the file's name.  None if the file cannot be read."""
        from safetensors import SafetensorError, safe_open

        if not Path(file_name).is_file():
            return None
        try:
            with safe_open(file_name, framework="pt") as file:
                names = list(file.keys())
                if not names:
                    return None
                tensor = file.get_tensor(key if key in names else names[0])
        except (OSError, SafetensorError):
            return None
        return tensor if not self.put_tensor(file_name if key is None else key, tensor) else None

    # -- inside

    def _locals(self, keys: Sequence[str]) -> list[Local | None]:
        """The tensors, in memory of their own."""
        handles: list[BufferHandle | None] = self.batch_get_buffer(keys)
        return [from_handle(handle) for handle in handles]
