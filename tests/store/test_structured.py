"""Batches of named fields; those of torch are in tensor_cases.py."""

import json
import pickle
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from mooncake.structured_object_store import (
    BundleTransferPolicy,
    MooncakeBundleTransfer,
    StructuredMemberSlice,
    export_dataproto_ref,
    import_dataproto_ref,
    raw_destination,
    tensor_object_buffer,
)

ROWS = 6
IDS = np.arange(ROWS * 5, dtype=np.int64).reshape(ROWS, 5)
TEXTS = np.array(["a", "bb", "", "dddd", "é", "f" * 1000], object)
TOOLS = [None, {"name": "x", 3: [1.5, True]}, (1, (b"\0", "s")), np.arange(3, dtype=np.int16), np.float32(0.5), []]


@pytest.fixture
def transfer(store):
    return MooncakeBundleTransfer(store, key_prefix="rl")


@pytest.fixture
def ref(transfer):
    data = {
        "batch": {"ids": IDS, "mask": IDS[:, ::2] % 2 == 0, "scale": np.array(0.25)},
        "non_tensor_batch": {"text": TEXTS, "tools": TOOLS},
        "meta_info": {"step": 7, "name": "é"},
    }
    return transfer.put_dataproto(data, namespace="rollout", partition="step-1", stage="rollout")


def keys(master) -> list[str]:
    return master.get("/get_all_keys").split()


def same(got, want) -> bool:
    if isinstance(want, np.ndarray | np.generic):
        return type(got) is type(want) and got.dtype == want.dtype and np.array_equal(got, want)
    return type(got) is type(want) and got == want


def test_everything_comes_back(transfer, ref):
    got = transfer.get_dataproto(ref)
    assert got["meta_info"] == {"step": 7, "name": "é"}
    assert list(got["batch"]) == ["ids", "mask", "scale"]
    assert same(got["batch"]["ids"], IDS)
    assert same(got["batch"]["mask"], np.ascontiguousarray(IDS[:, ::2] % 2 == 0))
    assert same(got["batch"]["scale"], np.array(0.25))
    assert same(got["non_tensor_batch"]["text"], TEXTS)
    assert all(map(same, got["non_tensor_batch"]["tools"], TOOLS))
    assert (ref.batch_size, ref.namespace, ref.partition) == (ROWS, "rollout", "step-1")
    assert transfer.release_result(got) is None


def test_rows(transfer, ref):
    cases = [
        (slice(1, 4), [1, 2, 3]),
        (slice(None, None, -2), [5, 3, 1]),
        (StructuredMemberSlice(0, 4, 6), [4, 5]),
        ([5, 0, 0, 1, 2, -1], [5, 0, 0, 1, 2, 5]),
        (np.array([3]), [3]),
        ([], []),
    ]
    for rows, numbers in cases:
        got = transfer.get_dataproto(ref, rows=rows)
        assert same(got["batch"]["ids"], IDS[numbers])
        assert same(got["batch"]["mask"], (IDS[:, ::2] % 2 == 0)[numbers])
        assert same(got["batch"]["scale"], np.array(0.25))
        assert same(got["non_tensor_batch"]["text"], TEXTS[numbers])
        assert all(map(same, got["non_tensor_batch"]["tools"], [TOOLS[number] for number in numbers]))


def test_rows_of_another_kind(transfer, ref):
    with pytest.raises(IndexError, match="row 6 is not one of the 6 rows"):
        transfer.get_dataproto(ref, rows=[0, 6])
    with pytest.raises(TypeError, match="row numbers"):
        transfer.get_dataproto(ref, rows="abc")
    with pytest.raises(ValueError, match="axis 0 only"):
        transfer.get_dataproto(ref, rows=StructuredMemberSlice(axis=1, start=0, end=1))


def test_some_fields(transfer, ref):
    got = transfer.get_dataproto(ref, fields=["text"], batch_fields=["ids"], meta_info_keys=["step"])
    assert (list(got["batch"]), list(got["non_tensor_batch"]), got["meta_info"]) == (["ids"], ["text"], {"step": 7})
    assert transfer.get_dataproto(ref, fields=[])["batch"] == {}
    with pytest.raises(KeyError, match="no field 'nonsense'; it has ids"):
        transfer.get_dataproto(ref, fields=["nonsense"])
    with pytest.raises(KeyError, match="is in non_tensor_batch"):
        transfer.get_dataproto(ref, batch_fields=["text"])


def test_classes(transfer, ref):
    made = transfer.get_dataproto(ref, fields=["ids"], data_cls=SimpleNamespace)
    assert same(made.batch["ids"], IDS)
    assert made.meta_info["step"] == 7

    class Other:
        @classmethod
        def from_dict(cls, tensors, non_tensors, meta_info):
            return (cls, list(tensors), list(non_tensors), meta_info["step"])

    assert transfer.get_dataproto(ref, data_cls=Other)[1:] == (["ids", "mask", "scale"], ["text", "tools"], 7)
    again = transfer.put_dataproto(made)  # an object with the three attributes
    assert same(transfer.get_dataproto(again)["batch"]["ids"], IDS)


def test_handles_go_to_other_processes(transfer, ref, make_store):
    other = MooncakeBundleTransfer(make_store(0), key_prefix="rl")
    handle = json.loads(json.dumps(export_dataproto_ref(ref)))
    assert import_dataproto_ref(handle) == ref
    for one in (handle, pickle.loads(pickle.dumps(ref))):
        assert same(other.get_dataproto(one, fields=["text"])["non_tensor_batch"]["text"], TEXTS)
    with pytest.raises(ValueError, match="no handle"):
        other.get_dataproto({"stage_refs": {}})


def test_stages(transfer, ref, master):
    scores = np.linspace(0, 1, ROWS, dtype=np.float32)
    more = transfer.append_dataproto_fields(ref, {"scores": scores, "old": IDS}, stage="scores")
    assert list(transfer.get_dataproto(more, fields=["scores", "ids"])["batch"]) == ["ids", "scores"]
    assert list(ref.field_index) == ["ids", "mask", "scale", "text", "tools"]
    before = set(keys(master))
    with pytest.raises(ValueError, match="'scores' is there already"):
        transfer.append_dataproto_fields(more, {"scores": scores}, stage="again")
    with pytest.raises(ValueError, match="'old' is of a stage that would be replaced"):
        transfer.append_dataproto_fields(more, {"scores": scores}, stage="again", overwrite=True)
    with pytest.raises(ValueError, match="stage 'scores' is there already"):
        transfer.append_dataproto_fields(more, {"fresh": scores}, stage="scores")
    with pytest.raises(ValueError, match="3 rows, but the batch has 6"):
        transfer.append_dataproto_fields(more, {"fresh": scores[:3]}, stage="short")
    assert set(keys(master)) == before
    new = {"batch": {"scores": scores * 2, "old": IDS * 2}, "meta_info": {"step": 8}}
    newer = transfer.append_dataproto_fields(export_dataproto_ref(more), new, stage="scores", overwrite=True)
    got = transfer.get_dataproto(newer, fields=["scores"])
    assert same(got["batch"]["scores"], scores * 2)
    assert got["meta_info"] == {"step": 8, "name": "é"}
    assert len(keys(master)) == len(before)
    with pytest.raises(RuntimeError, match="stage 'scores' is gone"):
        transfer.get_dataproto(more, fields=["scores"])
    transfer.cleanup_dataproto(newer)
    assert keys(master) == []
    transfer.cleanup_dataproto(newer)
    with pytest.raises(RuntimeError, match="gone from the pool"):
        transfer.get_dataproto(newer)


def test_view(transfer, ref, store):
    view = transfer.dataproto_manifest_view(ref)
    fields = view["stages"]["rollout"]["fields"]
    assert (view["batch_size"], list(fields)) == (ROWS, list(ref.field_index))
    ids = fields["ids"]
    assert (ids["section"], ids["kind"], ids["dtype"], ids["shape"], ids["nbytes"]) == (
        "batch",
        "array",
        "<i8",
        [ROWS, 5],
        IDS.nbytes,
    )
    assert store.get(ids["key"]) == IDS.tobytes()


def test_destinations(transfer, ref, store):
    into = np.zeros_like(IDS)
    got = transfer.get_dataproto(ref, batch_fields=["ids"], destinations={"ids": into})
    assert got["batch"]["ids"] is into
    assert same(into, IDS)
    part = np.zeros((2, 5), np.int64)
    transfer.get_dataproto(ref, batch_fields=["ids"], destinations={"ids": part}, rows=[4, 1])
    assert same(part, IDS[[4, 1]])
    memory = np.zeros(1000, np.uint8)
    assert store.register_buffer(memory.ctypes.data, memory.nbytes) == 0
    room = raw_destination(memory.ctypes.data + 8, 500, memory, pre_registered=True)
    got = transfer.get_dataproto(ref, fields=["ids"], destinations={"ids": room}, rows=slice(3))["batch"]["ids"]
    assert same(got, IDS[:3])
    assert memory[8 : 8 + got.nbytes].tobytes() == got.tobytes()
    assert not memory[:8].any()
    assert store.unregister_buffer(memory.ctypes.data) == 0


def test_destinations_that_do_not_fit(transfer, ref):
    cases = [
        ("ids", np.zeros((ROWS, 4), np.int64), "shape"),
        ("ids", np.zeros((ROWS, 5), np.int32), "type <i8"),
        ("ids", np.zeros((ROWS, 10), np.int64)[:, ::2], "contiguous"),
        ("ids", bytearray(1000), "bytearray is no destination"),
        ("ids", raw_destination(1, 8, None), "240 bytes, but its destination 8"),
        ("ids", tensor_object_buffer(1, 8, None), "no tensor object"),
        ("text", np.zeros(8), "encoded"),
    ]
    for field, destination, words in cases:
        with pytest.raises(ValueError, match=words):
            transfer.get_dataproto(ref, destinations={field: destination})


def test_what_cannot_be_stored(transfer, master):
    cases = [
        ({"a": IDS, "b": IDS[:2]}, ValueError, "a 6, b 2"),
        ({"batch": {"a": IDS}, "non_tensor_batch": {"a": TOOLS}}, ValueError, "both in batch"),
        ({"a": [object()]}, TypeError, "row 0 of field 'a' has a builtins.object"),
        ({"a": [{1.5: 2}]}, TypeError, "key of type float"),
        ({"a": [1 << 70]}, ValueError, "64 bits"),
        ({"a": 3}, TypeError, "field 'a' is int"),
        ({"a": np.array([[None]])}, TypeError, "array of objects of shape"),
        ({"batch": {"a": IDS}, "meta_info": {"x": {1, 2}}}, TypeError, "meta_info has a builtins.set"),
        (3, TypeError, "neither batch"),
    ]
    for data, error, words in cases:
        with pytest.raises(error, match=words):
            transfer.put_dataproto(data)
        assert keys(master) == []


def test_zero_copy_takes_nothing_that_is_encoded(transfer):
    policy = BundleTransferPolicy(copy_mode="zero_copy")
    assert transfer.put_dataproto({"a": IDS}, policy=policy).batch_size == ROWS
    with pytest.raises(ValueError, match="zero_copy forbids"):
        transfer.put_dataproto({"a": TOOLS}, policy=policy)
    with pytest.raises(ValueError, match="expected auto, copy or zero_copy"):
        BundleTransferPolicy(copy_mode="fast")


def test_full_pool_keeps_nothing_of_it(transfer, master):
    with pytest.raises(RuntimeError, match=r"field 'large' could not be stored: NO_AVAILABLE_HANDLE \(-200\)"):
        transfer.put_dataproto({"small": np.zeros(1000), "large": np.zeros((1000, 10_000))})
    assert keys(master) == []


def test_empty_batches(transfer):
    ref = transfer.put_dataproto({"a": np.zeros((0, 3)), "b": []})
    got = transfer.get_dataproto(ref)["batch"]
    assert got["a"].shape == (0, 3)
    assert got["b"] == []
    assert transfer.get_dataproto(transfer.put_dataproto({})) == {"batch": {}, "non_tensor_batch": {}, "meta_info": {}}


def test_examples_of_the_documents(master):
    text = (Path(__file__).parents[2] / "docs" / "structured.md").read_text()
    examples = "".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    assert examples.count("127.0.0.1:50051") == 1
    program = examples.replace("127.0.0.1:50051", master.address)
    subprocess.run([sys.executable, "-c", program], timeout=60, check=True)
    assert keys(master) == []
