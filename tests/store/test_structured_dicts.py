"""Flat dictionaries as batches, what is said about their fields, and handles; those of torch are in tensor_cases.py."""

import copy
import json

import numpy as np
import pytest

from mooncake.structured_object_store import (
    FieldSchema,
    MooncakeBundleTransfer,
    MooncakeDataProtoRef,
    RemoteBundleRef,
    StructuredFieldLocation,
    export_dataproto_ref,
    export_ref,
    import_dataproto_ref,
    import_ref,
    is_dataproto_ref_handle,
)

IDS = np.arange(12).reshape(4, 3)
TEXTS = ["a", "bb", "", "é"]


class Dictionary(dict):
    """A store with nothing but put, get and remove, which has no config and returns nothing."""

    def put(self, key, value):
        self[key] = bytes(value)

    def remove(self, key, force):
        self.pop(key)


@pytest.fixture
def values():
    return Dictionary()


@pytest.fixture
def transfer(values):
    return MooncakeBundleTransfer(values)


def kept(transfer, data, **options):
    """Of each field its section, and what comes back."""
    ref = transfer.put(data, type="dict", **options)
    sections = {name: place.section for name, place in ref.field_index.items()}
    return sections, ref.meta_info, transfer.get(ref, type="dict")


def test_a_dictionary_in_the_pool(store, master):
    transfer = MooncakeBundleTransfer(store, key_prefix="rl")
    objects = np.array([1, "x", None, [2]], object)
    data = {"step": 7, "ids": IDS, "text": TEXTS, "objects": objects, "name": "é"}
    ref = transfer.put(data, type="dict", namespace="n", partition="p", stage="s")
    assert (ref.batch_size, ref.namespace, ref.partition, list(ref.stage_refs)) == (4, "n", "p", ["s"])
    assert ref.stage_refs["s"].manifest_key.startswith("rl/n/p/s/")
    got = transfer.get(json.loads(json.dumps(export_ref(ref))), type="dict")
    assert list(got) == ["step", "name", "ids", "text", "objects"]
    assert np.array_equal(got.pop("ids"), IDS)
    assert got == {"step": 7, "name": "é", "text": TEXTS, "objects": [1, "x", None, [2]]}
    part = transfer.get(ref, type="dict", fields=["text"], rows=[3, 0], meta_info_keys=["step", "nothing"])
    assert part == {"step": 7, "text": ["é", "a"]}
    whole = transfer.get(ref)  # the type is how it is given, not how it is kept
    assert list(whole["batch"]) == ["ids"]
    assert list(whole["non_tensor_batch"]) == ["text", "objects"]
    assert MooncakeBundleTransfer.release_result(got) is None
    transfer.remove_dict(ref)
    assert master.get("/get_all_keys").split() == []
    with pytest.raises(RuntimeError, match="stage 's' is gone from the pool"):
        transfer.get_dict(ref)


def test_names_of_before(transfer, values):
    ref = transfer.put_legacy_dict({"ids": IDS, "step": 1}, partition="p")
    got = transfer.get_legacy_dict(ref)
    assert np.array_equal(got.pop("ids"), IDS)
    assert got == {"step": 1}
    transfer.remove_legacy_dict(export_ref(ref))
    assert values == {}
    assert transfer.get_dict(transfer.put_dict({"text": TEXTS})) == {"text": TEXTS}


def test_which_part_a_field_is(transfer):
    data = {"dense": IDS, "rows": TEXTS, "tuple": (1, 2, 3, 4), "scalar": np.array(2), "text": "abcd", "none": None}
    sections, meta, got = kept(transfer, data)
    assert sections == {"dense": "batch", "rows": "non_tensor_batch", "tuple": "non_tensor_batch"}
    assert list(meta) == ["scalar", "text", "none"]
    assert (got["tuple"], got["text"], got["scalar"]) == ([1, 2, 3, 4], "abcd", 2)
    assert kept(transfer, {"step": 1})[:2] == ({}, {"step": 1})
    assert kept(transfer, {}) == ({}, {}, {})


def test_sections_that_are_declared(transfer):
    schemas = {
        "stops": FieldSchema("auto", metadata={"section": "meta_info"}),
        "absent": FieldSchema("auto", metadata={"section": "batch"}),
    }
    data = {"ids": IDS, "stops": [1, 2]}
    assert kept(transfer, data, field_schemas=schemas)[:2] == ({"ids": "batch"}, {"stops": [1, 2]})
    rows = {"texts": FieldSchema("utf8_ragged", metadata={"section": "non_tensor_batch"})}
    data = {"texts": ["a", "b"], "others": ["x", "y"], "table": IDS[:2]}  # only declared lists are rows now
    sections, meta, got = kept(transfer, data, field_schemas=rows)
    assert (sections, meta) == ({"texts": "non_tensor_batch", "table": "batch"}, {"others": ["x", "y"]})
    assert got["texts"] == ["a", "b"]


def test_how_many_rows_there_are(transfer):
    """Arrays say it before lists."""
    sections, meta, _ = kept(transfer, {"stops": [1, 2], "ids": IDS, "text": TEXTS})
    assert (sections, meta) == ({"ids": "batch", "text": "non_tensor_batch"}, {"stops": [1, 2]})
    assert kept(transfer, {"text": TEXTS, "x": 1})[:2] == ({"text": "non_tensor_batch"}, {"x": 1})


def test_types_of_numbers_that_are_declared(transfer):
    def read(codec, value, kind="dict", **metadata):
        given = {"a": value} if kind == "dict" else {"non_tensor_batch": {"a": value}}
        schema = FieldSchema(codec, metadata={"section": "non_tensor_batch", **metadata})
        got = transfer.get(transfer.put(given, type=kind, field_schemas={"a": schema}), type=kind)
        return got["a"] if kind == "dict" else got["non_tensor_batch"]["a"]

    for value in ([1, None], np.array([1, None], object)):
        assert list(map(type, read("ndarray", value, dtype="float32"))) == [float, type(None)]
    assert read("ndarray", np.array([1, 2]), dtype="float32") == [1.0, 2.0]
    assert read("ndarray", [1.5, 2], dtype="int64") == [1, 2]
    assert read("ndarray", [1.5, "x"], dtype="nonsense") == [1.5, "x"]
    assert read("auto", [1.5, 2], dtype="int64") == [1.5, 2]
    first, none, third = read("typed_ragged", [[1, 2], None, np.array([1.5])], dtype="float32")
    assert (list(map(type, first)), none, third.dtype, third.tolist()) == ([float, float], None, np.float32, [1.5])
    got = read("ndarray", np.array([1, 2]), kind="dataproto", dtype="float32")
    assert (got.dtype, got.tolist()) == (np.float32, [1.0, 2.0])
    got = read("typed_ragged", np.array([[1], None], object), kind="dataproto", dtype="float32")
    assert (got.dtype, got.tolist()) == (object, [[1.0], None])
    with pytest.raises(ValueError, match="row 1 of field 'a' cannot be float32"):
        read("ndarray", [1, "x"], dtype="float32")


def test_dictionaries_that_are_refused(transfer, values):
    in_batch, as_rows = ({"section": section} for section in ("batch", "non_tensor_batch"))
    cases = [
        ({"a": IDS, "b": IDS[:2]}, {}, ValueError, "the arrays have .*'section': 'meta_info'.*: a 4, b 2"),
        ({"a": [1], "b": [1, 2], "c": "x"}, {}, ValueError, "the lists have .*'section': 'meta_info'.*: a 1, b 2"),
        ({"a": IDS, "b": IDS[:2]}, {"a": in_batch, "b": in_batch}, ValueError, "equally many rows: a 4, b 2"),
        ({"a": 3}, {"a": in_batch}, ValueError, "field 'a' has no rows"),
        ({"a": "abcd"}, {"a": as_rows}, TypeError, "field 'a' is str"),
        ({"a": TEXTS}, {"a": {"section": "nowhere"}}, ValueError, "the section 'nowhere'"),
        ({"a": [object()]}, {}, TypeError, "row 0 of field 'a' has a builtins.object"),
        ({"a": IDS, "b": object()}, {}, TypeError, "meta_info has a builtins.object"),
        (3, {}, TypeError, "takes a dictionary, not a int"),
    ]
    for data, metadata, error, words in cases:
        schemas = {name: FieldSchema("auto", metadata=one) for name, one in metadata.items()}
        with pytest.raises(error, match=words):
            transfer.put(data, type="dict", field_schemas=schemas)
        assert values == {}
    for call in (transfer.put, transfer.get):
        with pytest.raises(ValueError, match="'table' is unsupported: expected 'dataproto' or 'dict'"):
            call({}, type="table")


def test_schemas_of_batches(transfer, values):
    data = {"batch": {"ids": IDS}, "non_tensor_batch": {"text": [*TEXTS[:3], None]}, "meta_info": {"step": 1}}
    assert transfer.put(data, field_schemas={"text": FieldSchema("utf8_ragged")}).batch_size == 4
    values.clear()
    cases = [
        ({"text": FieldSchema("utf8_ragged", nullable=False)}, "row 3 of field 'text' is None"),
        ({"text": FieldSchema("auto", metadata={"section": "batch"})}, "says batch, but the data has it in non_tensor"),
        ({"step": FieldSchema("auto", metadata={"section": "batch"})}, "says batch, but the data has it in meta_info"),
        ({"ids": FieldSchema("pickle")}, "the codec 'pickle': expected one of auto"),
    ]
    for schemas, words in cases:
        with pytest.raises(ValueError, match=words):
            transfer.put(data, field_schemas=schemas)
    ref = transfer.put({"ids": IDS}, chunk_bytes=1)
    with pytest.raises(ValueError, match="row 0 of field 'more' is None"):
        transfer.append_dataproto_fields(
            ref,
            {"non_tensor_batch": {"more": [None] * 4}},
            stage="more",
            field_schemas={"more": FieldSchema("auto", nullable=False)},
        )
    with pytest.raises(ValueError, match="chunk_bytes must be a positive"):
        transfer.put({"ids": IDS}, chunk_bytes=0)


def test_handles(transfer):
    assert (export_ref, import_ref) == (export_dataproto_ref, import_dataproto_ref)
    ref = transfer.put({"batch": {"ids": IDS}, "meta_info": {"step": 7, "scale": [1.5, None]}}, stage="s")
    key = ref.stage_refs["s"].manifest_key
    assert ref.stage_refs == {"s": RemoteBundleRef(key, {})}
    handle = export_ref(ref)
    assert handle == {
        "type": "mooncake_dataproto_ref",
        "version": 1,
        "kind": "bundle_stages",
        "batch_size": 4,
        "namespace": "default",
        "partition": "default",
        "global_indexes": None,
        "stage_refs": {"s": {"manifest_key": key}},
        "field_index": {"ids": {"stage": "s", "member": "ids", "section": "batch"}},
        "meta_info": {"step": 7, "scale": [1.5, None]},
    }
    assert import_ref(handle) == ref
    assert is_dataproto_ref_handle(handle)
    assert not is_dataproto_ref_handle(ref)
    least = {name: handle[name] for name in ("type", "version", "kind", "batch_size", "stage_refs", "field_index")}
    assert import_ref(least) == MooncakeDataProtoRef(
        4, {"s": RemoteBundleRef(key, {})}, {"ids": StructuredFieldLocation("s", "ids", "batch")}
    )
    with pytest.raises(TypeError, match="expected a MooncakeDataProtoRef, not dict"):
        export_ref(handle)


def test_metadata_that_json_would_change(transfer):
    meta = {
        "plain": 1,
        "tuple": (1, 2),
        "bytes": b"x",
        "numbers": {1: 2},
        "none": float("inf"),
        "inside": [{"a": (1,)}],
    }
    ref = transfer.put({"batch": {"ids": IDS}, "meta_info": meta})
    handle = json.loads(json.dumps(export_ref(ref), allow_nan=False))
    assert handle["meta_info"] == {"plain": 1}
    assert import_ref(handle).meta_info == meta
    assert type(import_ref(handle).meta_info["inside"][0]["a"]) is tuple


def test_handles_that_are_none(transfer):
    handle = export_ref(transfer.put({"ids": IDS}, stage="s"))
    cases = [
        ("type", "other", "no handle"),
        ("version", 2, "unsupported version 2: expected 1"),
        ("kind", "other", "unsupported kind 'other'"),
        ("batch_size", "4", "batch_size must be a whole number"),
        ("stage_refs", [], "stage_refs must be a mapping, not list"),
        ("stage_refs", {"s": {}}, "stage 's' has no manifest_key"),
        ("field_index", {"ids": {}}, "which member the field 'ids' is"),
        ("field_index", {"ids": {"stage": "t", "member": "m", "section": "batch"}}, "stage 't', which"),
        ("field_index", {"ids": {"stage": "s", "member": "m", "section": "x"}}, "section 'x'"),
        ("meta_info", None, "meta_info must be a mapping"),
        ("global_indexes", 3, "global_indexes must be a list"),
        ("global_indexes", [True], "global_indexes must be a whole number"),
    ]
    for name, value, words in cases:
        with pytest.raises(ValueError, match=words):
            transfer.get({**copy.deepcopy(handle), name: value})


def test_a_manifest_of_something_else(transfer, values):
    ref = transfer.put({"ids": IDS}, stage="s")
    values[ref.stage_refs["s"].manifest_key] = b'{"version": 1, "layout": "bundle"}'
    with pytest.raises(RuntimeError, match="no manifest of a batch of this package"):
        transfer.get(ref)


def test_batches_in_a_store_of_three_calls(transfer, values):
    batch = {"batch": {"ids": IDS, "scale": np.array(0.5)}, "non_tensor_batch": {"text": TEXTS}, "meta_info": {"x": 1}}
    ref = transfer.put(batch)
    got = transfer.get(ref, rows=[2, 3, 0])
    assert np.array_equal(got["batch"]["ids"], IDS[[2, 3, 0]])
    assert (got["batch"]["scale"], got["non_tensor_batch"]["text"]) == (0.5, ["", "é", "a"])
    into = np.zeros_like(IDS)
    assert transfer.get(ref, fields=["ids"], destinations={"ids": into})["batch"]["ids"] is into
    assert np.array_equal(into, IDS)
    (key,) = (key for key in values if key.endswith("/ids"))
    del values[key]
    for rows in (None, [0]):
        with pytest.raises(RuntimeError, match=r"field 'ids' cannot be read .*OBJECT_NOT_FOUND \(-704\)"):
            transfer.get(ref, rows=rows)
    values[key] = b"short"
    with pytest.raises(RuntimeError, match="it has 5 bytes, not 96"):
        transfer.get(ref)
    with pytest.raises(RuntimeError, match=r"INVALID_PARAMS \(-600\)"):
        transfer.get(ref, rows=[0])
    transfer.cleanup_dataproto(ref)
    assert values == {}
