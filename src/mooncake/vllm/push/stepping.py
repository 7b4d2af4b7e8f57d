"""A step of prefill's engine: tells `Pushes` which layers of what it computes are there.

The model calls a hook after each layer, where it is run so; then a layer's blocks are pushed while the next one is
computed.  On a GPU the layer is only queued by then: an event behind it is waited for by a thread.  Layers for which no
hook has come (whole CUDA graphs) are there at the end of the step.
"""

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from mooncake.transfer.pieces import Int64Array
from mooncake.vllm.device import Fence
from mooncake.vllm.push.items import Share
from mooncake.vllm.push.pushes import Pushes, StepEnd

logger = logging.getLogger("vllm.mooncake")

GROUP = 4 << 20  # bytes: layers that are smaller in a step are told of together
_STOP_LIMIT = 5.0


class _Computed(NamedTuple):
    fence: Fence
    ends: list[StepEnd]
    layers: Int64Array


class Steps:
    """Of the engine's thread; has one of its own."""

    def __init__(
        self, pushes: Pushes, names: Sequence[str], block_bytes: Sequence[int], fence: Callable[[], Any], hooks: bool
    ) -> None:
        """`names`, `block_bytes`: of the layers.  `fence` makes one.  `hooks`: whether a hook means that the layer of
        the whole step is there."""
        self._pushes, self._fence, self._hooks = pushes, fence, hooks
        self._places = {name: i for i, name in enumerate(names)}
        self._block_bytes = max(block_bytes)
        self._ends: list[StepEnd] = []
        self._at_once = 1
        self._left = np.empty(0, bool)  # layers that have not been told of
        self._group: list[int] = []
        self._queue: queue.SimpleQueue[_Computed | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="mooncake-push-order", daemon=True)
        self._thread.start()

    def begin(self, shares: list[Share]) -> None:
        self._ends, self._group = [], []  # of a step that was given up
        if not shares:
            return
        self._ends = self._pushes.step(shares)
        blocks = sum(len(share.new) for share in shares)
        self._at_once = max(1, GROUP // max(1, blocks * self._block_bytes))
        self._left = np.ones(len(self._places), bool)

    def layer(self, name: str) -> None:
        """The hook."""
        if not self._ends or not self._hooks:
            return
        place = self._places.get(name)
        if place is None or not self._left[place]:
            return
        self._left[place] = False
        self._group.append(place)
        if len(self._group) >= self._at_once:
            self._tell(np.array(self._group))

    def end(self) -> None:
        """All of the step's work is queued."""
        if not self._ends:
            return
        self._tell(np.concatenate((np.array(self._group, np.int64), np.flatnonzero(self._left))))
        self._ends = []

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(_STOP_LIMIT)

    def _tell(self, layers: Int64Array) -> None:
        self._group = []
        if len(layers):
            self._queue.put(_Computed(self._fence(), self._ends, layers))

    def _run(self) -> None:
        while (computed := self._queue.get()) is not None:
            try:
                computed.fence.wait()
                self._pushes.computed(computed.ends, computed.layers)
            except Exception:
                logger.exception("Layers of a step were not pushed; decode computes what it lacks")
