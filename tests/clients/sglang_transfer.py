"""SGLang's prefill and decode instances hand KV cache over: its own managers, senders and receivers, whose pools lie in
CPU memory.

Forked by zygote.py; every function is one process and says what its calls returned.
"""

import os

from tests.clients import stand_ins

stand_ins.install("triton", "sgl_kernel", "torchvision", "IPython")

import signal  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402
from sglang.srt.disaggregation.base.conn import KVArgs, KVPoll  # noqa: E402
from sglang.srt.disaggregation.mooncake.conn import (  # noqa: E402
    MooncakeKVBootstrapServer,
    MooncakeKVManager,
    MooncakeKVReceiver,
    MooncakeKVSender,
)
from sglang.srt.disaggregation.utils import DisaggregationMode  # noqa: E402
from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import (  # noqa: E402
    init_mooncake_transfer_engine,
)
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool  # noqa: E402
from sglang.srt.runtime_context import SpawnRanks, publish  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402

HOST = "127.0.0.1"
PAGE, LAYERS, HEADS, WIDTH, SLOTS = 16, 4, 2, 32, 1024
ROOMS, AUX_BYTES = 8, 256  # requests that may be under way; what goes with each beside its KV cache
STATES = {KVPoll.Failed: "Failed", KVPoll.Success: "Success"}


class Instance:
    """One scheduler's share of the work, with a pool of its own."""

    def __init__(self, mode: DisaggregationMode, bootstrap_port: int) -> None:
        arguments = ServerArgs(
            model_path="dummy",
            device="cpu",
            host=HOST,
            disaggregation_mode=mode.value,
            disaggregation_transfer_backend="mooncake",
            disaggregation_bootstrap_port=bootstrap_port,
        )
        context = publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0))
        context.parallel.override_permanently(pp_group=None)  # there is one stage
        init_mooncake_transfer_engine(HOST, gpu_id=0)
        self.bootstrap = f"{HOST}:{bootstrap_port}"
        self.pool = MHATokenToKVPool(
            SLOTS, PAGE, torch.bfloat16, HEADS, WIDTH, LAYERS, device="cpu", enable_memory_saver=False
        )
        self.aux = torch.zeros(ROOMS, AUX_BYTES, dtype=torch.uint8)
        self.manager = MooncakeKVManager(self._description(), mode, arguments)

    def _description(self) -> KVArgs:
        args = KVArgs()
        args.engine_rank = args.gpu_id = args.pp_rank = args.prefill_start_layer = args.system_dp_rank = 0
        args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens = self.pool.get_contiguous_buf_infos()
        args.kv_layer_ids = []
        args.kv_cache_dtype_str = "bfloat16"
        args.aux_data_ptrs, args.aux_data_lens = [self.aux.data_ptr()], [self.aux.nbytes]
        args.aux_item_lens = [AUX_BYTES]
        args.state_types, args.state_data_ptrs, args.state_data_lens, args.state_item_lens = [], [], [], []
        args.state_layer_ids, args.state_dim_per_tensor = [], []
        args.ib_device = ""
        args.kv_head_num = args.total_kv_head_num = HEADS
        args.page_size = PAGE
        args.prefill_end_layer = LAYERS
        args.mla_compression_ratios = None
        return args

    def pages(self, indices: np.ndarray) -> torch.Tensor:
        """Contents of pages in all layers."""
        chosen = torch.from_numpy(indices.astype(np.int64))
        buffers = [buffer.view(-1, PAGE, HEADS, WIDTH)[chosen] for buffer in (*self.pool.k_buffer, *self.pool.v_buffer)]
        return torch.stack(buffers)


def wait(poll: Callable[[], object], wanted: Callable[[object], bool], limit: float = 20):
    end = time.monotonic() + limit
    while not wanted(value := poll()):
        assert time.monotonic() < end, f"still {value}"
        time.sleep(0.002)
    return value


def settled(state) -> bool:
    return state in (KVPoll.Success, KVPoll.Failed)


def prompt(room: int) -> torch.Tensor:
    """What prefill computes for a room: as many pages as its number."""
    generator = torch.Generator().manual_seed(room)
    return torch.randn(2 * LAYERS, room, PAGE, HEADS, WIDTH, generator=generator).bfloat16()


def source(room: int) -> np.ndarray:
    """Its pages in prefill's pool: neither contiguous nor in order."""
    return np.arange(3 * room, 0, -3, dtype=np.int32)[:room]


def target(room: int) -> np.ndarray:
    return np.array([7 + (5 * page) % 53 for page in range(room)], dtype=np.int32)


class Prefill(Instance):
    def __init__(self, port: int) -> None:
        self._server = MooncakeKVBootstrapServer(HOST, port)
        super().__init__(DisaggregationMode.PREFILL, port)

    def begin(self, room: int) -> MooncakeKVSender:
        """Waits until decode has said where the pages of this prompt are to go."""
        sender = MooncakeKVSender(self.manager, self.bootstrap, room)
        sender.init(room, aux_index=room % ROOMS)
        wait(sender.poll, lambda state: state != KVPoll.Bootstrapping)
        return sender

    def compute(self, room: int) -> None:
        pages = torch.from_numpy(source(room).astype(np.int64))
        for buffer, values in zip((*self.pool.k_buffer, *self.pool.v_buffer), prompt(room), strict=True):
            buffer.view(-1, PAGE, HEADS, WIDTH)[pages] = values
        self.aux[room % ROOMS] = room

    def send(self, sender: MooncakeKVSender, room: int) -> str:
        """In two chunks; what became of it."""
        first = room // 2
        self.compute(room)
        sender.send(source(room)[:first])
        sender.send(source(room)[first:])
        return STATES[wait(sender.poll, settled)]


class Decode(Instance):
    def __init__(self, port: int) -> None:
        super().__init__(DisaggregationMode.DECODE, port)
        wait(lambda: self.manager.try_ensure_parallel_info(self.bootstrap), bool)

    def ask(self, room: int) -> MooncakeKVReceiver:
        receiver = MooncakeKVReceiver(self.manager, self.bootstrap, room)
        receiver.init(0)
        receiver.send_metadata(target(room), aux_index=room % ROOMS)
        return receiver

    def receive(self, room: int) -> list:
        """Its state in the end; whether the whole pool is as it should be; what came beside the KV cache."""
        before = self.pages(np.arange(SLOTS // PAGE + 1))
        state = wait(self.ask(room).poll, settled)
        before[:, torch.from_numpy(target(room).astype(np.int64))] = prompt(room)
        same = torch.equal(self.pages(np.arange(SLOTS // PAGE + 1)), before)
        return [STATES[state], same, int(self.aux[room % ROOMS].unique())]


def prefill(port: int, rooms: list[int]) -> list[str]:
    instance = Prefill(port)
    return [instance.send(instance.begin(room), room) for room in rooms]


def decode(port: int, rooms: list[int]) -> list:
    instance = Decode(port)
    return [instance.receive(room) for room in rooms]


def decode_that_waits(port: int, room: int) -> None:
    Decode(port).ask(room)
    signal.pause()


def prefill_that_loses_decode(port: int, victim: int, lost: int, rooms: list[int]) -> dict:
    """Decode, process `victim`, dies before its pages are sent: its session is given up, and not that of the next."""
    instance = Prefill(port)
    manager = instance.manager
    sender = instance.begin(lost)
    (session,) = manager.transfer_infos[lost]
    alive = manager._send_probe(session)
    os.kill(victim, signal.SIGKILL)
    wait(lambda: manager._send_probe(session), bool)
    began = time.monotonic()
    state = instance.send(sender, lost)
    took = time.monotonic() - began
    given_up = manager.failed_sessions == {session}
    manager.failed_session_probe_interval = manager.failed_session_probe_max_interval = 0.001
    manager.failed_session_idle_timeout = 600
    manager._run_one_probe_pass()
    result = {
        "alive": alive,
        "lost": state,
        "soon": took < 8,
        "given up": given_up,
        "stays": session in manager.failed_sessions,
        "next": [instance.send(instance.begin(room), room) for room in rooms[:1]],
    }
    # What is given up by mistake comes back when its engine answers a probe.
    (living,) = manager.decode_kv_args_table.keys() - {session}
    manager.failed_sessions.add(living)
    manager._run_one_probe_pass()
    result["comes back"] = living not in manager.failed_sessions
    result["after that"] = [instance.send(instance.begin(room), room) for room in rooms[1:]]
    return result


def engine_alone() -> dict:
    """The class that both stand on, with the results its callers look at."""
    engine = init_mooncake_transfer_engine(HOST, gpu_id=0, ib_device="mlx5_0,mlx5_1")
    memory = torch.arange(4096, dtype=torch.uint8).view(2, -1)
    a, b = memory[0].data_ptr(), memory[1].data_ptr()
    engine.register(a, 2048)
    session = engine.get_session_id()
    result = {
        "batch": engine.batch_register([b], [2048]),
        "again": engine.batch_register([b], [2048]) < 0,
        "probe": engine.send_probe(session),
        "one": engine.transfer_sync(session, a, b, 100),
        "many": engine.batch_transfer_sync(session, [a + 100, a + 300], [b + 1000, b + 1500], [100, 200]),
        "beyond": engine.batch_transfer_sync(session, [a], [b + 2000], [100]) < 0,
        "nobody": engine.transfer_sync(f"{HOST}:1", a, b, 1) < 0,
        "device": engine.get_ib_device(),
        "inner": engine.get_engine() is not None,
    }
    engine.deregister(a)
    result["leave"] = engine.batch_deregister([b])
    want = torch.arange(4096, dtype=torch.uint8).view(2, -1).clone()
    want[1, :100] = want[0, :100]
    want[1, 1000:1100] = want[0, 100:200]
    want[1, 1500:1700] = want[0, 300:500]
    return {**result, "same": torch.equal(memory, want)}
