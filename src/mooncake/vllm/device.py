"""The order of copies against the forward passes that fill and read blocks.

On CPUs a forward pass is over when the connector is called.  On a GPU it is only queued then: a `Fence` is an event
behind it on its stream, on which a mover's thread waits before it touches the blocks.
"""

from typing import Any


class Fence:
    """Passes when all work that was queued on the device when it was made is done."""

    def __init__(self, device: Any) -> None:
        """`device`: the torch device that the KV cache is on."""
        self._device = device
        self._event: Any = None
        if device.type == "cuda":
            import torch

            self._event = torch.cuda.Event(blocking=True)
            self._event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        if self._event is not None:
            import torch

            torch.cuda.set_device(self._device)
            self._event.synchronize()
