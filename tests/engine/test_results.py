"""The table of results of spec 2, call by call, within one process (its own session is a peer like any other)."""

import ctypes
import itertools
import json
import mmap
import subprocess
import sys

import numpy as np
import pytest

from mooncake import engine as surface
from mooncake.engine import TransferEngine, TransferNotify, TransferOpcode
from tests.engine.conftest import HOST, MIB


def new(host: str = HOST, metadata: str = "P2PHANDSHAKE", protocol: str = "tcp", device: str | None = "") -> int:
    return TransferEngine().initialize(host, metadata, protocol, device)


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({}, 0),
        ({"metadata": "p2phandshake"}, 0),
        ({"protocol": "rdma"}, 0),
        ({"protocol": "rdma", "device": "mlx5_0,mlx5_1"}, 0),
        ({"protocol": "no-such-protocol"}, 0),
        ({"protocol": "xgmi"}, -1),
        ({"device": None}, 0),
        ({"host": "127.0.0.1:1"}, 0),
        ({"host": "localhost"}, 0),
        ({"host": ""}, -1),
        ({"host": "no-such-host.invalid"}, -1),
        ({"metadata": "http://127.0.0.1:1/metadata"}, -1),
        ({"metadata": "etcd://127.0.0.1:1"}, -1),
        ({"metadata": "redis://127.0.0.1:1"}, -1),
        ({"metadata": "127.0.0.1:2379"}, -1),
        ({"metadata": ""}, -1),
    ],
)
def test_initialize(changed, code, caplog):
    assert new(**changed) == code
    if code:
        assert [record.levelname for record in caplog.records] == ["ERROR"]
        assert "initialize failed: " in caplog.text


def test_initialize_ext():
    assert TransferEngine().initialize_ext(HOST, "P2PHANDSHAKE", "tcp", "", "p2phandshake") == 0
    assert TransferEngine().initialize_ext(HOST, "127.0.0.1:2379", "tcp", "", "etcd") == -1


def test_initialize_takes_positions_only():
    with pytest.raises(TypeError):
        TransferEngine().initialize(local_hostname=HOST, metadata_server="P2PHANDSHAKE", protocol="tcp", device_name="")


def test_ports(make_side, monkeypatch):
    assert 15000 <= make_side().engine.get_rpc_port() <= 17000
    monkeypatch.setenv("MC_MIN_RPC_PORT", "15777")
    monkeypatch.setenv("MC_MAX_RPC_PORT", "15777")
    assert make_side().engine.get_rpc_port() == 15777
    assert new() == -1  # taken
    monkeypatch.setenv("MC_MAX_RPC_PORT", "15")
    assert new() == -1
    monkeypatch.setenv("MC_MAX_RPC_PORT", "many")
    assert new() == -1


def test_names():
    assert surface.Read is TransferOpcode.Read is TransferEngine.TransferOpcode.Read
    assert (int(surface.Read), int(surface.Write)) == (0, 1)
    assert TransferOpcode(1) is surface.Write
    assert set(TransferOpcode.__members__) == {"Read", "Write"}
    assert str(surface.Read) == "TransferOpcode.Read"
    assert repr(surface.Read) == "<TransferOpcode.Read: 0>"
    notify = TransferNotify()
    assert (notify.name, notify.msg) == ("", "")
    assert TransferNotify("n", "m").msg == TransferNotify(name="n", msg="m").msg == "m"
    for name in ("CUDA", "EFA", "HIP", "INTRA_NVLINK", "MNNVL", "MUSA"):
        assert getattr(surface, f"SUPPORT_{name}") is False
    assert surface.CoroRPCInterface is surface.RpcInterface
    assert all(hasattr(surface, name) for name in surface.__all__)
    assert not hasattr(surface, "NoSuchThing")
    assert not hasattr(TransferEngine, "transfer_write_on_cuda")


def test_import_is_light():
    code = (
        "import os, sys, threading, time; before = len(os.listdir('/proc/self/fd')); start = time.process_time();"
        "import mooncake.engine; took = time.process_time() - start;"
        "assert 'numpy' not in sys.modules and threading.active_count() == 1;"
        "assert len(os.listdir('/proc/self/fd')) == before; print(took)"
    )
    took = [
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout)
        for _ in range(3)
    ]
    assert min(took) < 0.06


def test_before_initialize():
    engine = TransferEngine()
    assert engine.get_rpc_port() == 0
    assert engine.register_memory(4096, 4096) == -1
    assert engine.unregister_memory(4096) == -1
    assert engine.transfer_sync_write(f"{HOST}:15000", 4096, 4096, 1) == -1
    assert engine.batch_transfer_async_write(f"{HOST}:15000", [4096], [4096], [1]) == 0
    assert engine.get_batch_transfer_status([1]) == -1
    assert engine.transfer_check_status(1) == -1
    assert engine.get_notifies() == []
    assert engine.send_probe(f"{HOST}:15000") == -1
    assert engine.get_first_buffer_address(f"{HOST}:15000") == 0
    assert engine.allocate_managed_buffer(1) == 0


def test_initialize_again(make_side):
    side = make_side()
    port = side.engine.get_rpc_port()
    assert side.engine.initialize(HOST, "P2PHANDSHAKE", "tcp", "") == 0
    assert side.engine.get_rpc_port() != port
    assert side.engine.send_probe(f"{HOST}:{port}") == -102
    assert side.engine.register_memory(side.base, MIB) == 0


class TestRegistration:
    @pytest.fixture
    def at(self, make_side):
        """An engine, and an address with memory behind it that is not registered yet."""
        side = make_side()
        assert side.engine.unregister_memory(side.base) == 0
        self.side = side
        return side.engine, side.base

    def test_single(self, at):
        engine, base = at
        assert engine.register_memory(base, 4096) == 0
        assert engine.register_memory(base, 4096) == -7
        assert engine.register_memory(base + 100, 10) == -7
        assert engine.register_memory(base + 4095, 10) == -7
        assert engine.register_memory(base + 4096, 4096, "cpu:0") == 0
        assert engine.register_memory(base + 8192, 0) == -1
        assert engine.register_memory(0, 4096) == -1
        assert engine.register_memory(base + 8192, -5) == -1
        assert engine.register_memory(1 << 63, 5) == -1
        assert engine.unregister_memory(base + 1) == -3
        assert engine.unregister_memory(base) == 0
        assert engine.unregister_memory(base) == -3
        assert engine.register_memory(base, 100, location="*") == 0

    def test_batches_are_all_or_nothing(self, at):
        engine, base = at
        page = 4096
        assert engine.batch_register_memory([], []) == 0
        assert engine.batch_unregister_memory([]) == 0
        assert engine.batch_register_memory([base], [page, page]) == -1
        assert engine.batch_register_memory([base, base + 10], [page, page]) == -7
        assert engine.batch_register_memory([base, base + page], [page, 0]) == -1
        assert engine.unregister_memory(base) == -3  # nothing of them was registered
        assert engine.batch_register_memory([base + page, base], [page, page]) == 0
        assert engine.batch_register_memory([base + 2 * page, base + page], [page, page]) == -7
        assert engine.unregister_memory(base + 2 * page) == -3
        assert engine.batch_unregister_memory([base, base + 7, base + page]) == -3
        assert engine.unregister_memory(base) == -3  # the known ones are gone
        assert engine.unregister_memory(base + page) == -3

    def test_many(self, at):
        engine, base = at
        addresses = [base + i * 64 for i in range(20000)]
        assert engine.batch_register_memory(addresses[::-1], [64] * 20000) == 0
        assert engine.register_memory(addresses[777] + 3, 3) == -7
        assert engine.get_first_buffer_address(self.side.session) == addresses[-1]
        assert engine.batch_unregister_memory(addresses[5000:]) == 0
        assert engine.get_first_buffer_address(self.side.session) == addresses[4999]
        assert engine.batch_unregister_memory(addresses[:5000]) == 0
        assert engine.get_first_buffer_address(self.side.session) == 0

    def test_memory_that_is_not_there(self, at):
        engine, _ = at
        room = mmap.mmap(-1, 8192, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        base = ctypes.addressof(ctypes.c_char.from_buffer(room))
        ctypes.CDLL(None).mprotect(ctypes.c_void_p(base + 4096), 4096, 0)
        assert engine.register_memory(base, 8192) == -1
        assert engine.register_memory(base, 4096) == 0
        assert engine.register_memory(8192, 4096) == -1
        assert engine.batch_register_memory([base + 1024, 8192], [1, 1]) in (-1, -7)


@pytest.fixture
def side(transport, make_side):
    side = make_side()
    side.memory[:MIB] = 7
    return side


class TestTransfers:
    """`side` writes to and reads from itself."""

    def test_single(self, side):
        engine, own, base = side.engine, side.session, side.base
        assert engine.transfer_sync_write(own, base, base + MIB, 1000) == 0
        assert side.memory[MIB : MIB + 1000].min() == 7
        assert side.memory[MIB + 1000] == 0
        assert engine.transfer_sync_read(own, base + 2 * MIB, base, 1000, "a hint") == 0
        assert side.memory[2 * MIB : 2 * MIB + 1000].min() == 7
        assert engine.transfer_sync_write(own, base, base + MIB, 0) == 0
        assert engine.transfer_sync_write(own, base, base + MIB, -1) == -1
        assert engine.transfer_sync_write(own, 0, base + MIB, 1) == -1

    def test_ranges_must_be_registered(self, side):
        engine, own, base = side.engine, side.session, side.base
        size = side.memory.nbytes
        for call in (engine.transfer_sync_write, engine.transfer_sync_read):
            assert call(own, base, base + size - 10, 10) == 0
            assert call(own, base, base + size - 10, 11) == -1
            assert call(own, base, base - 1, 1) == -1
            assert call(own, base, 4096, 1) == -1
            assert call(own, base, 1 << 63, 1) == -1
            assert call(own, base, base + 5 * MIB, 4 * MIB) == -1
        assert engine.unregister_memory(base) == 0
        assert engine.batch_register_memory([base, base + MIB], [MIB, MIB]) == 0
        assert engine.transfer_sync_write(own, base + MIB, base, MIB) == 0
        assert engine.transfer_sync_write(own, base + 3 * MIB, base + MIB - 5, 10) == -1  # of two regions

    def test_batches(self, side):
        engine, own, base = side.engine, side.session, side.base
        for call in (engine.batch_transfer_sync_write, engine.batch_transfer_sync_read):
            assert call(own, [], [], []) == 0
            assert call(own, [base], [base + MIB], [1, 2]) == -1
            assert call(own, [base, base], [base + MIB], [1, 2]) == -1
            assert call(own, [base, base + 9], [base + MIB, base + 2 * MIB], [3, 0]) == 0
            assert call(own, [base, base + 9], [base + MIB, 4096], [3, 3]) == -1
        assert engine.batch_transfer_sync(own, [base], [base + 3 * MIB], [55], TransferOpcode.Write) == 0
        assert side.memory[3 * MIB : 3 * MIB + 55].min() == 7
        assert engine.batch_transfer_sync(own, [base], [base + 4 * MIB], [55], TransferOpcode.Read) == 0
        assert side.memory[:55].max() == 0
        arrays = [np.array([base + MIB - 8]), np.array([base + 5 * MIB]), np.array([8])]
        assert engine.batch_transfer_sync_write(own, *arrays) == 0
        assert side.memory[5 * MIB] == 7

    def test_local_memory_need_not_be_registered(self, side):
        data = np.full(100_000, 9, np.uint8)
        assert side.engine.transfer_sync_write(side.session, data.ctypes.data, side.base, data.nbytes) == 0
        assert side.memory[:100_000].min() == 9
        assert (
            side.engine.batch_transfer_sync_read(
                side.session, [data.ctypes.data, data.ctypes.data + 50], [side.base + MIB - 50] * 2, [50, 50]
            )
            == 0
        )
        assert data[:100].max() == 7

    def test_bad_local_memory_is_an_error(self, side):
        room = mmap.mmap(-1, 8192, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        bad = ctypes.addressof(ctypes.c_char.from_buffer(room))
        ctypes.CDLL(None).mprotect(ctypes.c_void_p(bad + 4096), 4096, 0)
        own, base = side.session, side.base
        for call in (side.engine.batch_transfer_sync_write, side.engine.batch_transfer_sync_read):
            assert call(own, [bad], [base], [8192]) == -1
            assert call(own, [bad, bad + 4096, bad], [base, base + 8192, base + 20000], [4096] * 3) == -1
            assert call(own, [8192], [base], [4096]) == -1
            assert call(own, [bad], [base], [4096]) == 0

    def test_async(self, side):
        engine, own, base = side.engine, side.session, side.base
        ids = [engine.batch_transfer_async_write(own, [base], [base + (2 + i) * MIB], [MIB]) for i in range(5)]
        assert all(ids)
        assert len(set(ids)) == 5
        assert engine.get_batch_transfer_status(ids) == 0
        assert engine.get_batch_transfer_status(ids) == -1  # free by now
        assert side.memory[2 * MIB : 7 * MIB].min() == 7
        assert (
            engine.get_batch_transfer_status([engine.batch_transfer_async_read(own, [base], [base + 7 * MIB], [9])])
            == 0
        )
        assert side.memory[:9].max() == 0
        assert engine.get_batch_transfer_status([]) == 0
        assert engine.batch_transfer_async_write(own, [base], [base], [1, 2]) == 0
        assert engine.batch_transfer_async_write(f"{HOST}:1", [base], [base], [1]) == 0
        bad = engine.batch_transfer_async(own, [base], [4096], [1], TransferOpcode.Write)
        assert bad
        assert engine.get_batch_transfer_status([bad]) == -1

    def test_submit_and_poll(self, side):
        engine, own, base = side.engine, side.session, side.base
        number = engine.transfer_submit_write(own, base, base + MIB, MIB)
        assert number
        while (status := engine.transfer_check_status(number)) == 0:
            pass
        assert status == 1
        assert engine.transfer_check_status(number) == -1
        assert side.memory[MIB : 2 * MIB].min() == 7
        number = engine.transfer_submit_write(own, base, 4096, MIB)
        while (status := engine.transfer_check_status(number)) == 0:
            pass
        assert status == -1
        assert engine.transfer_submit_write("nobody", base, base, 1) == 0

    def test_notifications(self, side):
        engine, own, base = side.engine, side.session, side.base
        write = TransferOpcode.Write
        assert engine.get_notifies() == []
        assert engine.transfer_sync(own, base, base + MIB, 5, write, TransferNotify("a", "first")) == 0
        assert (
            engine.batch_transfer_sync(own, [base], [base + MIB], [5], write, notify=TransferNotify("b", "ü" * 9)) == 0
        )
        assert engine.batch_transfer_sync(own, [], [], [], write, TransferNotify("c", "")) == 0
        assert engine.transfer_sync(own, base, 4096, 5, write, TransferNotify("d", "not sent")) == -1
        assert engine.transfer_sync(own, base, base + MIB, 5, write, None) == 0
        assert [(n.name, n.msg) for n in engine.get_notifies()] == [("a", "first"), ("b", "ü" * 9), ("c", "")]
        assert engine.get_notifies() == []

    def test_peers_that_are_not_there(self, side):
        base = side.base
        for name in ("", "nobody", f"{HOST}:1", f"{HOST}:99999", "no-such-host.invalid:15000"):
            assert side.engine.transfer_sync_write(name, base, base, 1) == -1
            assert side.engine.get_first_buffer_address(name) == 0
            assert side.engine.send_probe(name) != 0
        assert side.engine.send_probe(f"{HOST}:1") == -102
        assert side.engine.send_probe("no-such-host.invalid:15000") == -101
        assert side.engine.send_probe(side.session) == 0
        assert side.engine.get_first_buffer_address(side.session) == base


def test_managed_buffers(make_side):
    engine = make_side().engine
    sizes = [1, 8192, 8193, 100_000, 3 * MIB, 256 * MIB]
    addresses = [engine.allocate_managed_buffer(size) for size in sizes]
    assert all(addresses)
    spans = sorted(zip(addresses, sizes, strict=True))
    assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(spans))
    own = f"{HOST}:{engine.get_rpc_port()}"
    for address, size in zip(addresses, sizes, strict=True):
        assert engine.write_bytes_to_buffer(address, b"x" * min(size, 5), min(size, 5)) == 0
        assert engine.transfer_sync_read(own, addresses[0], address, 1) == 0  # registered
        assert engine.free_managed_buffer(address, size) == 0
        assert engine.free_managed_buffer(address, size) == -1
    assert engine.allocate_managed_buffer(0) == 0
    large = [engine.allocate_managed_buffer(256 * MIB) for _ in range(8)]
    assert all(large)  # everything was given back and joined
    assert engine.allocate_managed_buffer(8192) == 0
    assert engine.free_managed_buffer(large[3], 256 * MIB) == 0
    assert engine.allocate_managed_buffer(8192) == large[3]
    huge = engine.allocate_managed_buffer(257 * MIB)
    assert huge
    assert engine.free_managed_buffer(huge, 257 * MIB) == 0
    assert engine.free_managed_buffer(huge, 257 * MIB) == -1


def test_bytes_at_addresses(make_side):
    side = make_side()
    engine = side.engine
    assert engine.write_bytes_to_buffer(side.base + 5, b"hello\0you", 9) == 0
    assert engine.read_bytes_from_buffer(side.base + 5, 9) == b"hello\0you"
    assert engine.write_bytes_to_buffer(side.base, "text", 3) == 0
    assert engine.read_bytes_from_buffer(side.base, 5) == b"tex\0\0"
    assert engine.write_bytes_to_buffer(side.base, b"ab", 3) == -1
    assert engine.write_bytes_to_buffer(side.base, b"", 0) == 0
    assert engine.write_bytes_to_buffer(8192, b"ab", 2) == -1
    assert engine.read_bytes_from_buffer(side.base, 0) == b""
    with pytest.raises(ValueError, match="not mapped"):
        engine.read_bytes_from_buffer(8192, 5)


def test_topology(make_side, tmp_path, monkeypatch):
    engine = make_side().engine
    topology = json.loads(engine.get_local_topology())
    assert "cpu:0" in topology
    assert all(len(devices) == 2 for devices in topology.values())
    assert json.loads(engine.get_local_topology("no_such_device"))["cpu:0"] == [[], []]
    custom = tmp_path / "topology.json"
    custom.write_text('{"cpu:0": [["nic"], []]}')
    monkeypatch.setenv("MC_CUSTOM_TOPO_JSON", str(custom))
    assert json.loads(engine.get_local_topology(device_name="x"))["cpu:0"] == [["nic"], []]


def test_small_things(make_side):
    engine = make_side().engine
    assert isinstance(engine.get_engine(), surface.InnerTransferEngine)
    assert engine.get_engine_ptr() > 0
    assert engine.warmup_efa_segment("x") == 0
