"""An engine without a model: vLLM's real scheduler and KV cache manager, both halves of the connector, CPU tensors.

Runs in the vLLM environment.  In place of a forward pass every position of the KV cache is written with a number
that depends on all tokens up to it, and the numbers of all positions before are read and checked: no wrong, half-filled
or overwritten block goes unseen.  The next token depends on the number, so answers are checked as well.
"""

from typing import Any, ClassVar

import numpy as np
from vllm.config import KVEventsConfig, KVTransferConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, resolve_kv_cache_block_sizes
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from tests.connector.kinds import BLOCK, LAYERS, PAGE, Model

BLOCK_BYTES = LAYERS * PAGE * 4
PRIME = 2**31 - 1


def numbers(tokens: list[int]) -> np.ndarray:
    """What is written for each position."""
    value, values = 1, []
    for token in tokens:
        value = (value * 31 + token + 7) % PRIME
        values.append(value)
    return np.array(values, np.int64)


def answer(prompt: list[int], count: int) -> list[int]:
    """The tokens that follow a prompt."""
    value, tokens = int(numbers(prompt)[-1]), []
    for _ in range(count):
        token = value % 1000 + 5
        tokens.append(token)
        value = (value * 31 + token + 7) % PRIME
    return tokens


class Engine:
    connector = "MooncakeStoreConnector"
    settings: ClassVar[dict[str, Any]] = {"decline_slow_loads": False}  # a step here takes no time

    def __init__(
        self, model: str, num_blocks: int, role: str = "kv_both", kind: str = "full", *, events: bool = False,
        **extra: Any,
    ) -> None:  # fmt: skip
        """`kind`: of `kinds.KINDS`.  `extra`: the connector's settings, besides `settings`."""
        transfer = KVTransferConfig(
            kv_connector=self.connector,
            kv_connector_module_path="mooncake.vllm",
            kv_role=role,
            kv_connector_extra_config={**self.settings, **extra},
        )
        self.cache = Model(kind, num_blocks)
        config = EngineArgs(
            model=model, dtype="float32", enforce_eager=True, max_model_len=1024, block_size=BLOCK, max_num_seqs=8,
            max_num_batched_tokens=128, kv_transfer_config=transfer, async_scheduling=False,
            kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null") if events else None,
        ).create_engine_config()  # fmt: skip
        self.config = config
        config.cache_config.num_gpu_blocks = num_blocks
        if self.cache.states:
            config.cache_config.mamba_cache_mode = "align"
        hash_fn = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_fn)
        block_size, hash_size = resolve_kv_cache_block_sizes(self.cache.config, config)
        self._hasher = get_request_block_hasher(hash_size, hash_fn)
        self.worker = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, self.cache.config)
        with set_current_vllm_config(config):
            self.worker.register_kv_caches(self.cache.caches)
        self.scheduler = Scheduler(
            config, self.cache.config, StructuredOutputManager(config), block_size, hash_block_size=hash_size,
            log_stats=True,
        )  # fmt: skip
        self.restarts = 0
        self._adjust(kind)
        self.requests: dict[str, tuple[list[int], int]] = {}  # id → (prompt, tokens to answer)
        self.answers: dict[str, list[int]] = {}  # finished ones
        self.external = 0  # tokens loaded, as vLLM counts them
        self.preemptions = 0
        self.stats: list[dict[str, list[dict[str, Any]]]] = []  # of both halves, as vLLM's API server gets them
        self._finished: set[str] = set()

    def _adjust(self, kind: str) -> None:
        """What of the connector follows the kind of model, and is counted."""
        self.half._groups.lag = self.cache.lag
        if kind == "untold":
            self.half.bind(self.scheduler.kv_cache_manager.block_pool)
        release = self.half._allocations.release

        def counted(*arguments: Any) -> None:
            self.restarts += 1
            release(*arguments)

        self.half._allocations.release = counted

    # -- requests

    def add(self, name: str, prompt: list[int], count: int, params: dict[str, Any] | None = None) -> None:
        """`params`: its kv_transfer_params."""
        sampling = SamplingParams(max_tokens=count, ignore_eos=True, temperature=0)
        sampling.extra_args = {"kv_transfer_params": params} if params else None
        self.scheduler.add_request(Request(name, prompt, sampling, None, block_hasher=self._hasher))
        self.requests[name] = prompt, count

    def abort(self, name: str) -> None:
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        self.requests.pop(name, None)

    @property
    def half(self) -> Any:
        """The scheduler's half of the connector."""
        return self.scheduler.connector._scheduler

    @property
    def busy(self) -> bool:
        return self.scheduler.has_requests()

    # -- a step

    def step(self, loads_first: bool = False) -> None:
        output = self.scheduler.schedule()
        self.preemptions += len(output.preempted_req_ids or ())
        worker, connector_output = self.worker, KVConnectorOutput()
        worker.handle_preemptions(output.kv_connector_metadata)
        worker.bind_connector_metadata(output.kv_connector_metadata)
        if loads_first:
            worker.start_load_kv(None)
        sampled = self._forward(output.num_scheduled_tokens)
        if not loads_first:
            worker.start_load_kv(None)
        worker.wait_for_save()
        connector_output.finished_sending, connector_output.finished_recving = worker.get_finished(
            output.finished_req_ids
        )
        connector_output.invalid_block_ids = worker.get_block_ids_with_load_errors()
        connector_output.kv_connector_stats = worker.get_kv_connector_stats()
        connector_output.kv_connector_worker_meta = worker.build_connector_worker_meta()
        worker.clear_connector_metadata()
        names = list(sampled)
        outputs = self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                names,
                {name: i for i, name in enumerate(names)},
                [sampled[name] for name in names],
                kv_connector_output=connector_output,
            ),
        )
        for each in outputs.values():
            if each.scheduler_stats is not None and each.scheduler_stats.connector_prefix_cache_stats is not None:
                self.external += each.scheduler_stats.connector_prefix_cache_stats.hits
            if each.scheduler_stats is not None and each.scheduler_stats.kv_connector_stats:
                self.stats.append(each.scheduler_stats.kv_connector_stats)
            for one in each.outputs:
                self._take(one)

    def _forward(self, scheduled: dict[str, int]) -> dict[str, list[int]]:
        """Write the positions that are scheduled, check those before; for each request the next token if all are there
        now."""
        sampled = {}
        for name, count in scheduled.items():
            expected, done = self._part(name, count)
            self.cache.forward(self.scheduler.kv_cache_manager.get_block_ids(name), expected, done, name)
            sampled[name] = self._sample(name, expected)
        return sampled

    def _part(self, name: str, count: int) -> tuple[np.ndarray, int]:
        """(the numbers of all positions up to the end of this step, how many were there before)."""
        request = self.scheduler.requests[name]
        done = request.num_computed_tokens - count  # vLLM has counted this step's already
        return numbers(list(request.all_token_ids[: done + count])), done

    def _sample(self, name: str, expected: np.ndarray) -> list[int]:
        return [int(expected[-1]) % 1000 + 5] if len(expected) >= self.scheduler.requests[name].num_tokens else []

    def _take(self, output: Any) -> None:
        self.answers.setdefault(output.request_id, []).extend(output.new_token_ids)
        if output.finish_reason is not None:
            prompt, count = self.requests.pop(output.request_id, (None, 0))
            if prompt is not None:
                assert str(output.finish_reason) == "length", f"{output.request_id} ended with {output.finish_reason}"
                got, wanted = self.answers.pop(output.request_id), answer(prompt, count)
                assert got == wanted, f"{output.request_id}: answered {got}, not {wanted}"

    # -- what must hold

    def check_idle(self) -> None:
        """Nothing is left of requests that are over."""
        half = self.half
        assert not half._requests, half._requests
        assert not half._loading
        assert not half._saving.pins
        pool = self.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1  # one is vLLM's null block
        assert not self.scheduler.requests

    def describe(self) -> str:
        """Where each request is, and what blocks there are, for people."""
        scheduler, half = self.scheduler, self.half
        pool = scheduler.kv_cache_manager.block_pool
        free, room = f"{pool.get_num_free_blocks()} of {pool.num_gpu_blocks}", half._saving.pins.room
        running = [one.request_id for one in scheduler.running]
        lines = [f"blocks free {free}, room for pins {room}, units loading {len(half._loading)}, running {running}"]
        for name, request in scheduler.requests.items():
            state = half._requests.get(name)
            known = {slot: getattr(state, slot, None) for slot in ("loading", "offer", "limit", "missing", "spared")}
            blocks = [len(group) for group in scheduler.kv_cache_manager.get_block_ids(name)]
            computed = f"{request.num_computed_tokens} of {request.num_tokens} tokens computed"
            lines.append(f"{name}: {request.status!s}, {computed}, {request.num_preemptions=}, {blocks=}, {known}")
        return "\n".join(lines)

    def close(self) -> None:
        self.scheduler.shutdown()
        self.worker.shutdown()
