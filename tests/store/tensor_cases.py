"""The tensor calls: exact results.  Run in the vLLM environment, which has torch (see test_tensors.py): each `case_`
gets a fresh store."""

import ctypes
import os
import struct

import torch
from safetensors.torch import load_file, save_file

from mooncake.store import (
    ParallelAxis,
    ReadTarget,
    ReplicateConfig,
    TensorParallelism,
    _deserialize_tensor,
    _serialize_tensor,
    _tensor_metadata_size,
)
from mooncake.structured_object_store import (
    BundleTransferPolicy,
    MooncakeBundleTransfer,
    export_ref,
    tensor_object_buffer,
)

DTYPES = (
    "float32", "float64", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "bool", "float16",
    "bfloat16", "float8_e4m3fn", "float8_e5m2",
)  # fmt: skip
T = torch.arange(24, dtype=torch.float32).reshape(4, 6)


def same(got, wanted) -> bool:
    return got is not None and got.dtype == wanted.dtype and got.shape == wanted.shape and bool((got == wanted).all())


def raises(error, call, *arguments) -> bool:
    try:
        call(*arguments)
    except error:
        return True
    return False


def axis(kind, rank, size, split=None, expert=None, stage=None):
    made = ParallelAxis()
    made.kind, made.rank, made.size = kind, rank, size
    made.split_dim, made.expert_id, made.stage_id = split, expert, stage
    return made


def parallel(*axes):
    made = TensorParallelism()
    made.axes = list(axes)
    return made


def target(mode, *axes):
    made = ReadTarget()
    made.mode = mode
    if axes:
        made.parallelism = parallel(*axes)
    return made


class Writer:
    def __init__(self, rank, size, split_dim):
        self.rank, self.size, self.split_dim = rank, size, split_dim


class Room:
    """Registered memory."""

    def __init__(self, store, size=8192):
        self.tensor = torch.zeros(size, dtype=torch.uint8)
        self.at = self.tensor.data_ptr()
        assert store.register_buffer(self.at, size) == 0

    def hold(self, tensor) -> int:
        """Header and data at the beginning; their size."""
        head, address, size, _owner = _serialize_tensor(tensor)
        ctypes.memmove(self.at, head, len(head))
        ctypes.memmove(self.at + len(head), address, size)
        return len(head) + size


def keys(store, *names) -> list[bool]:
    return [found == 1 for found in store.batch_is_exist(list(names))]


def case_whole_tensors(store):
    assert store.put_tensor("t", T) == 0
    assert same(store.get_tensor("t"), T)
    assert store.put_tensor("t", T + 1) == 0
    assert same(store.get_tensor("t"), T)
    assert store.upsert_tensor("t", T + 1) == 0
    assert same(store.get_tensor("t"), T + 1)
    got = store.get_tensor("t")
    got[0, 0] = 99
    assert same(store.get_tensor("t"), T + 1)
    assert store.get_tensor("none") is None
    assert store.put_tensor("bad", 5) == store.put_tensor("bad", T.numpy()) == -600
    assert store.put_tensor("bad", torch.zeros([1] * 9)) == -600
    assert store.put_tensor("transposed", T.t()) == 0
    assert same(store.get_tensor("transposed"), T.t())
    for name, tensor in (("scalar", torch.tensor(3.5)), ("empty", torch.zeros(0, 4)), ("8", torch.ones([1] * 8))):
        assert store.put_tensor(name, tensor) == 0
        assert same(store.get_tensor(name), tensor)
    store.put_batch(["raw", "zeros"], [b"abc", bytes(400)])
    assert store.get_tensor("raw") is store.get_tensor("zeros") is None


def case_element_types(store):
    for i, name in enumerate(DTYPES):
        tensor = torch.tensor([0.0, 1.0, 1.0]).to(getattr(torch, name))
        assert store.put_tensor(name, tensor) == 0
        got = store.get_tensor(name)
        assert got.dtype == tensor.dtype
        assert torch.equal(got.view(torch.uint8), tensor.view(torch.uint8))
        assert struct.unpack_from("<i", store.get(name), 8)[0] == i
    for other in (torch.complex64, torch.float8_e4m3fnuz):
        assert store.put_tensor("other", torch.zeros(3).to(other)) == -600


def case_the_header(store):
    assert store.put_tensor_with_tp("w", T, 0, 2, 1) == 0
    raw = store.get("w_tp_1")
    assert len(raw) == 304 + 48 == _tensor_metadata_size() + 48
    assert struct.unpack_from("<IHHiiIIQQ", raw) == (0x4D4F4F4E, 1, 304, 0, 2, 1, 0, 304, 48)
    assert struct.unpack_from("<8q8q", raw, 40) == (4, 6, *[-1] * 6, 4, 3, *[-1] * 6)
    assert struct.unpack_from("<II6iq", raw, 168) == (1, 0, 1, 0, 1, 2, 1, 0, 3)
    assert not any(raw[208:304])
    assert raw[304:] == T[:, 3:].contiguous().numpy().tobytes()


def case_batches(store):
    assert store.batch_put_tensor(["a", "b"], [T, T[0]]) == [0, 0]
    a, none, b = store.batch_get_tensor(["a", "none", "b"])
    assert same(a, T)
    assert none is None
    assert same(b, T[0])
    assert store.batch_put_tensor(["a"], [T, T]) == [-600]
    assert store.batch_put_tensor([], []) == store.batch_get_tensor([]) == []
    assert store.batch_put_tensor(["c", "d"], [T, 5]) == [0, -600]
    assert store.batch_upsert_tensor(["a", "e"], [T * 2, T]) == [0, 0]
    assert same(store.get_tensor("a"), T * 2)


def case_configurations(store):
    config = ReplicateConfig()
    assert store.pub_tensor("a", T, config) == store.pub_tensor("b", T) == store.upsert_pub_tensor("a", T + 1) == 0
    assert same(store.get_tensor("a"), T + 1)
    assert store.pub_tensor("c", T, 4) == -600
    config.preferred_segments = ["x", "y"]
    assert store.pub_tensor("c", T, config) == store.upsert_pub_tensor("c", T, config) == -600
    assert store.batch_pub_tensor(["c"], [T], config) == store.batch_upsert_pub_tensor(["c"], [T], config) == [-600]
    assert store.pub_tensor_with_tp("c", T, config, 0, 2, 1) == -600
    assert store.batch_pub_tensor_with_tp(["c"], [T], config, 0, 2, 1) == [-600]
    config.replica_num = 2
    assert store.pub_tensor("c", T, config) == store.upsert_pub_tensor("c", T, config) == 0
    assert store.put_tensor_with_parallelism("d", T, parallel(axis("tp", 0, 2, 1)), ReplicateConfig()) == 0
    grouped = ReplicateConfig()
    grouped.group_ids = ["g"]
    assert store.pub_tensor_with_tp("e", T, grouped, 0, 2, 1) == 0
    assert store.upsert("e_tp_0", b"v", grouped) == 0  # it is in the group
    grouped.group_ids = ["g", "h"]
    assert store.pub_tensor("f", T, grouped) == -600


def case_into_addresses(store):
    store.put_tensor("t", T)
    store.put("raw", bytes(400))
    room = Room(store)
    got = store.get_tensor_into("t", room.at, 8192)
    assert same(got, T)
    assert got.data_ptr() == room.at + 304
    assert store.get_tensor_into("t", room.at, 310) is None
    assert store.get_tensor_into("none", room.at, 8192) is None
    assert store.get_tensor_into("t", 0, 8192) is store.get_tensor_into("raw", room.at, 8192) is None
    got = store.batch_get_tensor_into(["t", "none"], [room.at, room.at + 4096], [4096, 4096])
    assert same(got[0], T)
    assert got[1] is None
    assert store.batch_get_tensor_into(["t", "none"], [room.at], [4096]) == [-600, -600]
    assert store.batch_get_tensor_into([], [], []) == []
    assert store.get_tensor_into_cuda("t", torch.zeros(4, 6)) == -600
    assert store.batch_get_tensor_into_cuda(["t"], [torch.zeros(4, 6)]) == [-600]


def case_from_addresses(store):
    room = Room(store)
    size = room.hold(T)
    assert store.put_tensor_from("a", room.at, size) == 0
    assert same(store.get_tensor("a"), T)
    for at, length in ((room.at, size - 1), (room.at, size + 1), (room.at, 304), (room.at, 10), (0, size), (16, size)):
        assert store.put_tensor_from("b", at, length) == -600
    assert store.put_tensor_from("b", room.at + 8, 400) == -600
    assert store.batch_put_tensor_from(["b", "c"], [room.at, room.at + 8], [size, 400]) == [-600, -600]
    assert keys(store, "b", "c") == [False, False]
    assert store.batch_put_tensor_from(["b"], [room.at], [size, 1]) == [-600]
    assert store.batch_put_tensor_from([], [], []) == []
    room.hold(T + 1)
    assert store.upsert_tensor_from("a", room.at, size) == 0
    assert store.batch_upsert_tensor_from(["b"], [room.at], [size]) == [0]
    assert same(store.get_tensor("a"), T + 1)


def case_one_tensor_axis(store):
    assert store.put_tensor_with_tp("w", T, 0, 2, 1) == 0
    assert keys(store, "w", "w_tp_0", "w_tp_1") == [False, True, True]
    for rank in range(2):
        assert same(store.get_tensor_with_tp("w", rank, 2, 1), T[:, 3 * rank : 3 * rank + 3])
    assert store.get_tensor_with_tp("w", 2, 2, 1) is store.get_tensor_with_tp("w") is None
    assert store.put_tensor_with_tp("one", T) == 0
    assert same(store.get_tensor_with_tp("one"), T)
    for size, dim in ((4, 1), (3, 0), (2, 5), (2, -1)):
        assert store.put_tensor_with_tp("bad", T, 0, size, dim) == -600
    assert store.put_tensor_with_tp("bad", torch.tensor(1.0), 0, 2, 0) == -600
    assert store.put_tensor_with_tp("bad", 5, 0, 2, 0) == -600
    assert store.batch_put_tensor_with_tp(["x", "y"], [T, T], 0, 2, 0) == [0, 0]
    x, none, y = store.batch_get_tensor_with_tp(["x", "none", "y"], 1, 2)
    assert same(x, T[2:])
    assert same(y, T[2:])
    assert none is None
    assert store.batch_put_tensor_with_tp(["p", "q"], [T, 5], 0, 2, 0) == [-600, -600]
    assert store.batch_put_tensor_with_tp(["p", "q"], [T, T[:3]], 0, 2, 0) == [0, -600]
    assert store.batch_put_tensor_with_tp(["p", "q"], [T], 0, 2, 0) == [-600, -600]
    room = Room(store)
    assert same(store.get_tensor_with_tp_into("w", room.at, 4096, 1, 2, 1), T[:, 3:])
    assert store.get_tensor_with_tp_into("w", room.at, 305, 1, 2, 1) is None
    x, y = store.batch_get_tensor_with_tp_into(["x", "y"], [room.at, room.at + 4096], [4096, 4096], 1, 2)
    assert same(x, T[2:])
    assert same(y, T[2:])
    size = room.hold(T)
    assert store.put_tensor_with_tp_from("f", room.at, size, 0, 2, 1) == 0
    assert same(store.get_tensor_with_tp("f", 1, 2), T[:, 3:])
    assert store.put_tensor_with_tp_from("g", room.at, size) == 0
    assert store.put_tensor_with_tp_from("h", room.at, size - 1, 0, 2, 1) == -600
    assert store.put_tensor_with_tp_from("h", room.at, size, 0, 4, 1) == -600
    assert store.batch_put_tensor_with_tp_from(["h", "i"], [room.at] * 2, [size] * 2, 0, 2, 1) == [0, 0]
    assert store.batch_put_tensor_with_tp_from(["j", "k"], [room.at], [size] * 2, 0, 2, 1) == [-600, -600]


def case_shards_of_workers(store):
    tp = [parallel(axis("tp", rank, 2, 1)) for rank in range(2)]
    for rank in range(2):
        assert store.put_tensor_with_parallelism("w", T + 100 * rank, tp[rank]) == 0
    assert keys(store, "w_tp_0", "w_tp_1", "w__parallelism_manifest") == [True] * 3
    manifest = struct.unpack("<IHH4iQ8q", store.get("w__parallelism_manifest"))
    assert manifest == (0x574D414E, 1, 96, 0, 2, 1, 2, 0, 4, 12, *[-1] * 6)
    whole = torch.cat([T, T + 100], dim=1)
    read = store.get_tensor_with_parallelism
    assert same(read("w", target("full", axis("tp", 0, 2, 1))), whole)
    assert same(read("w", target("shard", axis("tp", 1, 2, 1))), T + 100)
    for size in (1, 3, 4, 6, 12):
        for rank in range(size):
            step = 12 // size
            assert same(
                read("w", target("shard", axis("tp", rank, size, 1))), whole[:, rank * step : (rank + 1) * step]
            )
    assert same(read("w", target("shard", axis("tp", 1, 2, 0))), whole[2:])
    assert read("w", target("shard", axis("tp", 0, 5, 1))) is None
    for other in (None, target("as_stored"), target("full"), target("as_stored", axis("tp", 1, 2, 1)), 5, tp[0]):
        assert read("w", other) is None
    for axes in ([axis("dp", 0, 2)], [axis("dp", 0, 2), axis("tp", 0, 2, 1)], [axis("tp", 9, 2, 1)]):
        assert read("w", target("shard", *axes)) is None
    assert store.put_tensor_with_parallelism("half", T, tp[0]) == 0
    assert read("half", target("full", axis("tp", 0, 2, 1))) is None
    assert same(read("half", target("shard", axis("tp", 0, 4, 1))), T[:, :3])
    assert read("half", target("shard", axis("tp", 3, 4, 1))) is None


def case_several_axes(store):
    put, read = store.put_tensor_with_parallelism, store.get_tensor_with_parallelism
    for rank in range(2):
        assert put("m", T, parallel(axis("tp", rank, 2, 1), axis("dp", 0, 2))) == 0
    assert keys(store, "m__dp_0of2__tp_1of2_sd1", "m__parallelism_manifest") == [True, True]
    assert same(read("m", target("full", axis("dp", 0, 2), axis("tp", 0, 2, 1))), T)
    assert same(read("m", target("shard", axis("dp", 0, 2), axis("tp", 1, 3, 1))), T[:, 2:4])
    assert read("m", target("shard", axis("dp", 1, 2), axis("tp", 0, 2, 1))) is None
    axes = (axis("tp", 1, 2, 1), axis("pp", 1, 2, stage=7), axis("ep", 0, 4, expert=3), axis("dp", 0, 2))
    assert put("all", T, parallel(*axes)) == 0
    assert keys(store, "all__dp_0of2__tp_1of2_sd1__ep_0of4_eid3__pp_1of2_sid7") == [True]
    assert same(read("all", target("shard", *axes)), T[:, 3:])
    assert put("e", T, parallel(axis("ep", 1, 4, expert=3))) == 0
    assert keys(store, "e__ep_1of4_eid3", "e__parallelism_manifest") == [True, False]
    assert same(read("e", target("shard", axis("ep", 1, 4, expert=3))), T)
    assert read("e", target("full", axis("ep", 1, 4, expert=3))) is None
    for bad in (
        [], [axis("tp", 0, 2)], [axis("zz", 0, 2)], [axis("tp", 2, 2, 0)], [axis("tp", 0, 0, 1)], [axis("tp", 0, 2, 5)],
        [axis("tp", 0, 2, 1), axis("tp", 0, 2, 0)], [axis("ep", 0, 2, 0)], [axis("dp", 0, 1), axis("tp", 0, 4, 1)],
        [axis("tp", 0, 2, -1)],
    ):  # fmt: skip
        assert put("bad", T, parallel(*bad)) == -600
    assert put("bad", T, 5) == put("bad", T, {"axes": []}) == put("bad", 5, parallel(axis("dp", 0, 2))) == -600
    assert raises(RuntimeError, target, "zz")


def case_writer_partitions(store):
    put, read = store.put_tensor_with_parallelism, store.get_tensor_with_parallelism
    assert put("w", T, None, writer_partition=Writer(1, 2, 1)) == 0
    assert keys(store, "w__writer_1of2_sd1", "w__writer_manifest") == [True, True]
    assert read("w", target("full")) is None
    assert same(read("w", target("shard", axis("tp", 1, 2, 1))), T[:, 3:])
    assert put("w", T, None, writer_partition=Writer(0, 2, 1)) == 0
    assert same(read("w", target("full")), T)
    assert same(read("w", target("shard", axis("tp", 1, 3, 1))), T[:, 2:4])
    assert read("w") is read("w", target("as_stored")) is None
    for writer in (Writer(0, 4, 1), Writer(2, 2, 1), Writer(0, 2, 5), 5):
        assert put("bad", T, None, writer_partition=writer) == -600
    assert put("bad", T, parallel(axis("tp", 0, 2, 1)), writer_partition=Writer(0, 2, 1)) == -600
    batch = store.batch_put_tensor_with_parallelism
    assert batch(["x", "y"], [T, T], None, writer_partitions=[Writer(0, 1, 0), None]) == [0, 0]
    assert same(read("x", target("full")), T)
    assert same(read("y", target("full")), T)
    assert batch(["x", "y"], [T, T], None, writer_partitions=[Writer(0, 1, 0)]) == [-600, -600]
    assert batch(["x", "y"], [T, T], [None]) == batch(["x", "y"], [T]) == [-600, -600]
    assert batch(["x", "y"], [T, T], parallel(axis("tp", 0, 2, 1))) == [-600, -600]
    assert batch([], []) == []


def case_parallel_batches_and_addresses(store):
    tp = parallel(axis("tp", 0, 2, 1))
    assert store.batch_put_tensor_with_parallelism(["a", "b"], [T, T], [tp, None]) == [0, 0]
    read = store.batch_get_tensor_with_parallelism
    got = read(["b", "none", "a"], [target("full"), None, target("shard", axis("tp", 0, 2, 1))])
    assert same(got[0], T)
    assert got[1] is None
    assert same(got[2], T)
    assert read(["a", "b"], [target("full")]) == [None, None]
    assert read(["b"], target("full")) == [None]
    room = Room(store)
    into = store.get_tensor_with_parallelism_into
    assert same(into("b", room.at, 4096), T)
    got = into("a", room.at, 4096, target("shard", axis("tp", 0, 4, 1)))
    assert same(got, T[:, :3])
    assert got.data_ptr() == room.at + 304
    raw = ctypes.string_at(room.at, 304)
    assert struct.unpack_from("<8q8q", raw, 40) == (4, 12, *[-1] * 6, 4, 3, *[-1] * 6)
    assert into("b", room.at, 350) is into("none", room.at, 4096) is None
    got = store.batch_get_tensor_with_parallelism_into(["b", "none"], [room.at, room.at + 4096], [4096, 4096])
    assert same(got[0], T)
    assert got[1] is None
    assert store.batch_get_tensor_with_parallelism_into(["b"], [room.at], [4096], [None, None]) == [None]
    size = room.hold(T)
    put = store.put_tensor_with_parallelism_from
    assert put("f", room.at, size, tp) == 0
    assert keys(store, "f_tp_0", "f_tp_1", "f__parallelism_manifest") == [True, True, False]
    assert put("g", room.at, size, parallel(axis("dp", 1, 2), axis("tp", 1, 2, 1))) == 0
    assert keys(store, "g__dp_1of2__tp_0of2_sd1", "g__dp_1of2__tp_1of2_sd1") == [True, True]
    assert put("h", room.at, size, None, writer_partition=Writer(1, 2, 1)) == put("i", room.at, size) == 0
    assert keys(store, "h__writer_1of2_sd1", "h__writer_manifest", "i") == [True] * 3
    assert put("j", room.at, size - 1, tp) == put("j", 0, size) == -600
    batch = store.batch_put_tensor_with_parallelism_from
    assert batch(["k", "l"], [room.at] * 2, [size] * 2, [None, tp]) == [0, 0]
    assert batch(["k", "l"], [room.at], [size] * 2, [None, tp]) == [-600, -600]


def case_parallel_upserts(store):
    tp = parallel(axis("tp", 0, 2, 1))
    wanted = target("shard", axis("tp", 0, 2, 1))
    for i in range(2):
        assert store.upsert_tensor_with_parallelism("w", T + i, tp) == 0
    assert store.put_tensor_with_parallelism("w", T + 5, tp) == 0
    assert same(store.get_tensor_with_parallelism("w", wanted), T + 1)
    assert store.batch_upsert_tensor_with_parallelism(["w"], [T + 7], [tp]) == [0]
    assert same(store.get_tensor_with_parallelism("w", wanted), T + 7)
    room = Room(store)
    size = room.hold(T)
    assert store.upsert_tensor_with_parallelism_from("w", room.at, size, tp) == 0
    assert store.batch_upsert_tensor_with_parallelism_from(["w"], [room.at], [size], [tp]) == [0]
    assert same(store.get_tensor_with_parallelism("w", wanted), T[:, :3])


def case_serialized_tensors(store):
    head, address, size, owner = _serialize_tensor(T)
    assert (type(head), len(head), size) == (bytes, 304, 96)
    assert address == owner.data_ptr()
    assert same(_deserialize_tensor(head + ctypes.string_at(address, size)), T)
    for bad in (b"123", bytes(400), head, 5):
        assert raises(ValueError, _deserialize_tensor, bad)
    for bad in (5, None, T.numpy()):
        assert raises(ValueError, _serialize_tensor, bad)


def case_safetensors(store):
    store.put_tensor("t", T)
    assert store.save_tensor_to_safetensor("t", "t.safetensors") == 0
    assert same(load_file("t.safetensors")["t"], T)
    assert store.save_tensor_to_safetensor("t") == 0
    assert os.path.exists("t")
    assert store.save_tensor_to_safetensor("none") == -1100
    assert store.save_tensor_to_safetensor("t", "no/such/folder") == -600
    save_file({"one": T, "two": T + 1}, "both.safetensors")
    load = store.load_tensor_from_safetensor
    assert same(load("two", file_name="both.safetensors"), T + 1)
    assert same(store.get_tensor("two"), T + 1)
    assert same(load("other", "both.safetensors"), T)
    assert same(load(file_name="both.safetensors"), T)
    assert same(store.get_tensor("both.safetensors"), T)
    assert load("x", file_name="none.safetensors") is None
    with open("broken.safetensors", "wb") as file:
        file.write(b"no tensors")
    assert load("x", file_name="broken.safetensors") is None
    save_file({"two": T + 5}, "again.safetensors")
    assert same(load("two", file_name="again.safetensors"), T + 5)
    assert same(store.get_tensor("two"), T + 1)  # as every put of a key that is there


def case_structured_tensors(store):
    """The fields of a batch that are torch's; see test_structured.py."""
    transfer = MooncakeBundleTransfer(store)
    fields = {name: (T - 3).to(getattr(torch, name)) for name in DTYPES}
    fields |= {"turned": torch.arange(24).reshape(6, 4).t(), "complex": torch.full((4,), 1 + 2j)}
    scalar, rows = torch.tensor(2.5), [T[0], {"inside": T.bfloat16()}, None, torch.tensor(1)]
    ref = transfer.put_dataproto({"batch": fields | {"scalar": scalar}, "non_tensor_batch": {"rows": rows}})
    got = transfer.get_dataproto(ref)
    assert all(same(got["batch"][name], wanted) for name, wanted in (fields | {"scalar": scalar}).items())
    assert same(got["non_tensor_batch"]["rows"][0], T[0])
    assert same(got["non_tensor_batch"]["rows"][1]["inside"], T.bfloat16())
    some = transfer.get_dataproto(ref, rows=[3, 0, 1])["batch"]
    assert all(same(some[name], wanted[[3, 0, 1]]) for name, wanted in fields.items())
    assert same(some["scalar"], scalar)
    view = transfer.dataproto_manifest_view(ref)["stages"]["default"]["fields"]
    assert same(store.get_tensor(view["turned"]["key"]), fields["turned"])  # they are tensors of the store

    into, part = torch.zeros(4, 6), torch.zeros(2, 6)
    assert transfer.get_dataproto(ref, fields=["float32"], destinations={"float32": into})["batch"]["float32"] is into
    transfer.get_dataproto(ref, fields=["float32"], destinations={"float32": part}, rows=slice(1, 3))
    assert same(into, fields["float32"]) and same(part, fields["float32"][1:3])

    whole = ctypes.create_string_buffer(304 + T.nbytes)
    place = tensor_object_buffer(ctypes.addressof(whole), len(whole), whole, batch_size=4)
    got = transfer.get_dataproto(ref, fields=["float32"], destinations={"float32": place})["batch"]["float32"]
    assert same(got, fields["float32"]) and got.data_ptr() == ctypes.addressof(whole) + 304
    policy = BundleTransferPolicy(copy_mode="zero_copy")
    again = transfer.put_dataproto({"t": place}, policy=policy)  # from where it lies
    assert same(transfer.get_dataproto(again)["batch"]["t"], fields["float32"])
    assert same(transfer.get_dataproto(again, rows=[2])["batch"]["t"], fields["float32"][[2]])
    assert raises(ValueError, lambda: transfer.put_dataproto({"t": T}, policy=policy))
    empty = ctypes.create_string_buffer(400)
    nothing = tensor_object_buffer(ctypes.addressof(empty), 400, empty)
    assert raises(ValueError, transfer.put_dataproto, {"t": nothing})


def case_structured_objects(store):
    """Tensors as members of structured objects and in flat dictionaries; see test_structured_objects.py."""
    transfer = MooncakeBundleTransfer(store)
    members = {name: (T - 3).to(getattr(torch, name)) for name in DTYPES}
    members |= {"turned": torch.arange(24).reshape(6, 4).t(), "complex": torch.full((4,), 1 + 2j)}
    members |= {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 3)}
    for chunk_bytes in (None, 50):
        ref = transfer.put_object(members, chunk_bytes=chunk_bytes)
        got = transfer.get_object(ref)
        assert list(got) == list(members) and all(same(got[name], wanted) for name, wanted in members.items())
        spec = transfer.read_spec(ref).select_members(["float32"])
        rows = spec.slice_member("float32", axis=0, start=1, end=4, step=2)
        assert same(transfer.materialize(rows).objects["float32"], members["float32"][1:4:2])
        into, part = torch.zeros(4, 6), torch.zeros(2, 6)
        assert transfer.materialize_into(spec, {"float32": into}).objects["float32"] is into
        assert transfer.materialize_into(rows, {"float32": part}).objects["float32"] is part
        assert same(into, members["float32"]) and same(part, members["float32"][1:4:2])
        whole = ctypes.create_string_buffer(304 + T.nbytes)
        place = tensor_object_buffer(ctypes.addressof(whole), len(whole), whole)
        found = transfer.materialize_into(spec, {"float32": place}).objects["float32"]
        assert same(found, members["float32"]) and found.data_ptr() == ctypes.addressof(whole) + 304
        assert raises(ValueError, transfer.materialize_into, rows, {"float32": place})
        assert raises(ValueError, transfer.materialize_into, spec, {"float32": torch.zeros(4, 6, dtype=torch.float64)})
        again = transfer.put_object(place, policy=BundleTransferPolicy(copy_mode="zero_copy"))  # from where it lies
        assert same(transfer.get_object(again), members["float32"])
        transfer.remove_bundle(ref)
        assert raises(RuntimeError, transfer.get_object, ref)
    assert same(transfer.get_object(transfer.put_object(T)), T)
    policy = BundleTransferPolicy(copy_mode="zero_copy")
    assert raises(ValueError, lambda: transfer.put_object(T, policy=policy))

    ref = transfer.put({"t": T, "rows": [T[0], None, 1, "x"], "one": torch.tensor(3)}, type="dict")
    assert {name: place.section for name, place in ref.field_index.items()} == {
        "t": "batch",
        "rows": "non_tensor_batch",
    }
    for one in (ref, export_ref(ref)):
        got = transfer.get(one, type="dict")
        assert same(got["t"], T) and same(got["rows"][0], T[0]) and got["rows"][1:] == [None, 1, "x"]
        assert same(got["one"], torch.tensor(3))


def case_after_close(store):
    store.close()
    assert store.put_tensor("t", T) == store.pub_tensor("t", T) == store.put_tensor_with_parallelism("t", T) == -600
    assert store.batch_put_tensor(["t"], [T]) == store.batch_put_tensor_with_parallelism(["t"], [T]) == [-600]
    assert store.get_tensor("t") is store.get_tensor_into("t", 1, 400) is store.get_tensor_with_parallelism("t") is None
    assert store.batch_get_tensor(["t"]) == store.batch_get_tensor_with_parallelism(["t"]) == [None]
    assert store.batch_get_tensor_into(["t"], [1], [400]) == [-600]
    assert store.put_tensor_from("t", 1, 400) == -600
