"""The scheduler's half: which prompts decode pulls, which prefill hands over, and whose blocks are kept meanwhile.

Runs on the scheduler's thread with every step and waits for nothing.  What a request wants is in its
`kv_transfer_params`: do_remote_prefill (decode), do_remote_decode (prefill), and one transfer_id for both halves.
"""

import logging
import zlib
from collections.abc import Iterable
from typing import Any

import numpy as np
from vllm.v1.request import RequestStatus

from mooncake.vllm.push.items import Handed, Pull, Share
from mooncake.vllm.push.plan import PushPlan, PushReport
from mooncake.vllm.push.recompute import compute_from
from mooncake.vllm.versions import BlockTables

logger = logging.getLogger("vllm.mooncake")

_NEEDED = ("transfer_id", "remote_bootstrap_addr", "remote_engine_id")
_COMPUTED = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


class _Handing:
    """A prompt that is computed for decode."""

    __slots__ = ("blocks", "full", "known", "preemptions", "request", "transfer")

    def __init__(self, request: Any, transfer: str, blocks: int) -> None:
        self.request, self.transfer, self.blocks = request, transfer, blocks
        self.known = self.full = 0  # blocks of its table, and whole ones, that the workers have been told of
        self.preemptions: int = request.num_preemptions

    def is_computed(self) -> bool:
        """Whether all its blocks are whole, and still its own."""
        return self.full == self.blocks and not self.was_preempted()

    def was_preempted(self) -> bool:
        """Since the workers were told last."""
        return bool(self.preemptions != self.request.num_preemptions)

    def restart(self) -> None:
        self.known = self.full = 0
        self.preemptions = self.request.num_preemptions


class Planner:
    def __init__(self, block_size: int, *, hands: bool, pulls: bool, resumes: bool = True) -> None:
        """`block_size` in tokens; `hands`, `pulls`: what this role does; `resumes`: whether the rest of a prompt can be
        computed behind what came of it; else nothing is pulled."""
        self._block_size = block_size
        self._resumes = resumes
        self._hands, self._pulls = hands, pulls
        self._plan = PushPlan()  # of the step that is being scheduled
        self._tables = BlockTables(1)
        self._handing: dict[str, _Handing] = {}
        self._held: set[str] = set()  # finished requests whose blocks are kept for decode
        self._pulling: dict[str, tuple[Any, int]] = {}  # (request, tokens that it had before)
        self._spared: set[str] = set()  # see `compute_from`

    # -- before a request is scheduled

    def matched(self, request: Any, local: int) -> tuple[int, bool]:
        """(tokens that come from prefill beyond the first `local`, whether between steps)."""
        params = request.kv_transfer_params
        if not params or not params.get("do_remote_prefill") or not self._can_pull(request, params):
            return 0, False
        if not self._resumes:
            return 0, False
        return max(0, request.num_prompt_tokens - local), request.num_prompt_tokens > local

    def _can_pull(self, request: Any, params: dict[str, Any]) -> bool:
        lacks = [name for name in _NEEDED if not isinstance(params.get(name), str) or not params[name]]
        if self._pulls and not lacks:
            return True
        params["do_remote_prefill"] = False  # said once
        logger.warning(
            "Request %s asks for a remote prefill, but %s; it is computed here",
            request.request_id,
            f"its kv_transfer_params lack {', '.join(lacks)}" if lacks else "this instance has kv_role kv_producer",
        )
        return False

    def allocated(self, request: Any, block_ids: list[int], external: int) -> None:
        """vLLM gave a request its blocks, of which `external` tokens are to come from prefill."""
        if request.request_id in self._spared:
            self._spared.discard(request.request_id)
            request.skip_reading_prefix_cache = False
        params = request.kv_transfer_params
        if not params:
            return
        if params.get("do_remote_prefill"):
            params["do_remote_prefill"] = False  # one transfer a request
            first = (request.num_prompt_tokens - external) // self._block_size
            last = self._blocks(request.num_prompt_tokens)
            blocks = block_ids[first:last] if external else []
            self._plan.pulls[request.request_id] = _pull(request, params, first, blocks)
            if external:
                self._pulling[request.request_id] = request, first * self._block_size
        elif params.get("do_remote_decode") and request.request_id not in self._handing:
            self._begin_handing(request, params)

    def _begin_handing(self, request: Any, params: dict[str, Any]) -> None:
        transfer = params.get("transfer_id")
        if not self._hands or not isinstance(transfer, str) or not transfer:
            params["do_remote_decode"] = False  # said once
            if transfer or not self._hands:  # a proxy that hands over through a pool names no transfer
                logger.warning(
                    "Request %s shall be handed to decode, but %s; it is not",
                    request.request_id,
                    "its transfer_id is no text" if self._hands else "this instance has kv_role kv_consumer",
                )
            return
        tokens = request.num_prompt_tokens
        self._handing[request.request_id] = _Handing(request, transfer, self._blocks(tokens))
        self._plan.begun[request.request_id] = Handed(transfer, tokens, _digest(request))

    # -- each step

    def plan(self, output: Any) -> PushPlan:
        """What the workers do in this step."""
        plan, self._plan = self._plan, PushPlan()
        if self._hands:
            self._tables.update(output)
            for request_id, state in self._handing.items():
                if state.was_preempted():
                    state.restart()
                    plan.preempted.append(request_id)
                tokens = output.num_scheduled_tokens.get(request_id)
                if tokens:
                    self._share(state, tokens, plan.shares)
        return plan

    def _share(self, state: _Handing, tokens: int, shares: list[Share]) -> None:
        request = state.request
        computed = request.num_computed_tokens + tokens
        done = computed >= request.num_prompt_tokens
        full = state.blocks if done else min(computed // self._block_size, state.blocks)
        if full == state.full:
            return
        new = self._tables.get(request.request_id)[0][state.known : state.blocks]
        state.known += len(new)
        state.full = full
        shares.append(Share(request.request_id, new, full))

    def report(self, report: PushReport | None, received: Iterable[str], sent: Iterable[str]) -> None:
        """What the workers did.  `received`, `sent`: requests with which all of them are through."""
        for request_id, whole in report.failed.items() if report is not None else ():
            if request_id in self._pulling:
                request, tokens = self._pulling[request_id]
                if not request.is_finished() and compute_from(request, tokens + whole * self._block_size):
                    self._spared.add(request_id)
        for request_id in received:
            self._pulling.pop(request_id, None)
        self._held.difference_update(sent)

    # -- the end

    def finished(self, request: Any) -> bool:
        """A request is over; whether its blocks are kept until the workers are through with them."""
        request_id, params = request.request_id, request.kv_transfer_params
        self._spared.discard(request_id)
        if request_id in self._pulling:
            self._plan.cancels.append(request_id)  # vLLM keeps its blocks until it is said to be received
            return False
        if not params:
            return False
        if params.get("do_remote_prefill"):  # it never got blocks: prefill need not keep its own
            if self._can_pull(request, params):
                self._plan.pulls[request_id] = _pull(request, params, 0, [])
            return False
        state = self._handing.pop(request_id, None)
        if state is not None and state.is_computed() and request.status in _COMPUTED:
            self._plan.finished.append(request_id)
            self._held.add(request_id)
            return True
        self._plan.begun.pop(request_id, None)
        transfer = state.transfer if state is not None else params.get("transfer_id")
        if params.get("do_remote_decode") and isinstance(transfer, str) and self._hands:
            self._plan.dropped[transfer] = f"prefill ended it as {request.status.name.lower()}"
        return False

    def busy(self) -> bool:
        """Whether something is left that only further steps bring about."""
        plan = self._plan
        return bool(self._held or self._pulling or plan.pulls or plan.cancels or plan.dropped)

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._block_size)


def _pull(request: Any, params: dict[str, Any], first: int, blocks: list[int]) -> Pull:
    return Pull(
        transfer=params["transfer_id"],
        registry=params["remote_bootstrap_addr"],
        engine=params["remote_engine_id"],
        first=first,
        blocks=blocks,
        tokens=request.num_prompt_tokens,
        digest=_digest(request),
    )


def _digest(request: Any) -> int:
    """A sum of the prompt's tokens, by which halves of different prompts are told; 0 if it is not made of tokens."""
    tokens = request.prompt_token_ids
    return zlib.crc32(np.array(tokens, np.int64).tobytes()) if tokens else 0
