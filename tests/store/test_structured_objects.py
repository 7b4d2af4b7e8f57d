"""Bundles and structured objects; those of torch are in tensor_cases.py."""

import json

import numpy as np
import pytest

from mooncake.store import ReplicateConfig
from mooncake.structured_object_store import (
    BundleTransferPolicy,
    MooncakeBundleTransfer,
    RemoteBundleRef,
    StructuredObjectPayload,
    StructuredObjectReadSpec,
    raw_destination,
    tensor_object_buffer,
)

TABLE = np.arange(96, dtype=np.int16).reshape(12, 8)


class Dictionary:
    """A store with nothing but put, get and remove."""

    def __init__(self):
        self.values = {}
        self.puts_left = 1 << 30
        self.configs = []

    def put(self, key, value, config=None):
        self.configs.append(config)
        if not self.puts_left:
            raise RuntimeError("no more puts")
        self.puts_left -= 1
        self.values[key] = bytes(value)
        return 0

    def get(self, key):
        return self.values[key]

    def remove(self, key, force=False):
        assert force
        del self.values[key]
        return 0


@pytest.fixture(params=["pool", "dictionary"])
def pool(request):
    return request.getfixturevalue("store") if request.param == "pool" else Dictionary()


in_dictionary = pytest.mark.parametrize("pool", ["dictionary"], indirect=True)


@pytest.fixture
def transfer(pool):
    return MooncakeBundleTransfer(pool, key_prefix="rl")


@pytest.fixture
def keys(pool, request):
    if isinstance(pool, Dictionary):
        return lambda: sorted(pool.values)
    master = request.getfixturevalue("master")
    return lambda: sorted(master.get("/get_all_keys").split())


def payload(metadata=None, **buffers):
    return StructuredObjectPayload(metadata, buffers)


def test_bundle(transfer, pool, keys):
    data = bytes(range(100))
    ref = transfer.put_bundle(b"meta", {"a": data, "b": np.arange(3, dtype=np.uint32), "none": b""}, chunk_bytes=40)
    base = ref.manifest_key.removesuffix("/manifest")
    partition, object_id = base.removeprefix("rl/").split("/")
    assert (partition, len(object_id)) == ("default", 32)
    chunks = [{"key": f"{base}/buffer/a/chunk/{number}", "bytes": size} for number, size in enumerate([40, 40, 20])]
    assert ref.manifest == {
        "version": 1,
        "layout": "bundle",
        "object_id": f"default/{object_id}",
        "meta": {"key": f"{base}/meta", "bytes": 4, "chunks": [{"key": f"{base}/meta", "bytes": 4}]},
        "buffers": {
            "a": {"key": f"{base}/buffer/a", "bytes": 100, "chunks": chunks},
            "b": {"key": f"{base}/buffer/b", "bytes": 12, "chunks": [{"key": f"{base}/buffer/b", "bytes": 12}]},
            "none": {"key": f"{base}/buffer/none", "bytes": 0, "chunks": []},
        },
    }
    assert json.loads(pool.get(ref.manifest_key)) == ref.manifest
    assert b"".join(pool.get(chunk["key"]) for chunk in chunks) == data
    assert len(keys()) == 6
    transfer.remove_bundle({"manifest_key": ref.manifest_key})
    assert keys() == []
    transfer.remove_bundle(ref)  # its manifest is in the handle: what is gone already is no error
    with pytest.raises(RuntimeError, match="gone from the pool"):
        transfer.remove_bundle({"manifest_key": ref.manifest_key})


@in_dictionary
def test_default_chunk(pool):
    transfer = MooncakeBundleTransfer(pool, "p", 17)
    ref = transfer.put_bundle(b"", {"a": bytes(35)}, partition="x")
    assert ref.manifest_key.startswith("p/x/")
    assert [chunk["bytes"] for chunk in ref.manifest["buffers"]["a"]["chunks"]] == [17, 17, 1]
    for chunk_bytes in (0, -1, True, 1.5):
        with pytest.raises(ValueError, match="chunk_bytes must be a positive"):
            MooncakeBundleTransfer(pool, default_chunk_bytes=chunk_bytes)
        with pytest.raises(ValueError, match="chunk_bytes must be a positive"):
            transfer.put_bundle(b"", {"a": b"x"}, chunk_bytes=chunk_bytes)


def test_structured_object(transfer):
    given = payload({"step": 7}, table=TABLE, raw=b"abc", rest={"x": [1, None, (2.5, "é")]})
    result = transfer.materialize(transfer.read_spec(transfer.put_structured_object(given)))
    assert result.metadata == {
        "layout": "structured",
        "step": 7,
        "__mooncake_structured_fields__": {
            "table": {"encoding": "ndarray", "dtype": "<i2", "shape": [12, 8]},
            "raw": {"encoding": "bytes"},
            "rest": {"encoding": "value"},
        },
    }
    assert list(result.objects) == ["table", "raw", "rest"]
    assert result.objects["table"].dtype == np.int16
    assert np.array_equal(result.objects["table"], TABLE)
    assert result.objects["table"].flags.c_contiguous
    assert result.objects["raw"] == b"abc"
    assert result.objects["rest"] == {"x": [1, None, (2.5, "é")]}
    assert StructuredObjectPayload(buffers={}).metadata == {}
    with pytest.raises(TypeError, match="needs buffers"):
        StructuredObjectPayload({})


@pytest.mark.parametrize("chunk_bytes", [None, 20, 1])
def test_members_and_rows(transfer, chunk_bytes):
    given = payload(turned=TABLE.T, table=TABLE, empty=TABLE[:0], scalar=np.array(2.5), raw=b"x" * 50)
    spec = transfer.read_spec(transfer.put_structured_object(given, chunk_bytes=chunk_bytes))
    assert isinstance(spec, StructuredObjectReadSpec)
    whole = transfer.materialize(spec).objects
    assert np.array_equal(whole["turned"], TABLE.T)
    assert whole["empty"].shape == (0, 8)
    assert whole["scalar"] == 2.5
    assert whole["scalar"].shape == ()
    assert whole["raw"] == b"x" * 50
    for start, end, step in [(3, 9, 1), (1, 12, 3), (0, 12, 1), (5, 5, 1), (9, 3, 1), (-4, 100, 2)]:
        part = spec.select_members(["table"]).slice_member("table", axis=0, start=start, end=end, step=step)
        result = transfer.materialize(part)
        assert list(result.objects) == ["table"]
        assert np.array_equal(result.objects["table"], TABLE[start:end:step])
        assert result.objects["table"].shape == TABLE[start:end:step].shape
    assert part.member_slice("table").step == 2
    assert part.member_slice("raw") is None
    assert list(transfer.materialize(part.select_members(None)).objects) == list(given.buffers)


def test_destinations(transfer):
    spec = transfer.read_spec(transfer.put_structured_object(payload(table=TABLE), chunk_bytes=40))
    whole, part, memory = np.zeros_like(TABLE), np.zeros((4, 8), np.int16), np.zeros(300, np.uint8)
    assert transfer.materialize_into(spec, {"table": whole}).objects["table"] is whole
    assert np.array_equal(whole, TABLE)
    rows = spec.slice_member("table", axis=0, start=2, end=10, step=2)
    assert transfer.materialize_into(rows, {"table": part}).objects["table"] is part
    assert np.array_equal(part, TABLE[2:10:2])
    room = raw_destination(memory.ctypes.data + 10, 200, memory)
    got = transfer.materialize_into(rows, {"table": room}).objects["table"]
    assert np.array_equal(got, TABLE[2:10:2])
    assert got.ctypes.data == memory.ctypes.data + 10
    assert not memory[:10].any()
    assert not memory[10 + got.nbytes :].any()


@in_dictionary
def test_reads_that_cannot_be(transfer):
    ref = transfer.put_structured_object(payload(table=TABLE, scalar=np.array(1), raw=b"abc", text="x"))
    spec = transfer.read_spec(ref)
    locked = np.zeros((2, 8), np.int16)
    locked.flags.writeable = False
    two = spec.slice_member("table", axis=0, start=1, end=3)
    cases = [
        (spec.slice_member("table", axis=1, start=0, end=2), {}, ValueError, "axis=0"),
        (spec.slice_member("table", axis=0, start=0, end=2, step=0), {}, ValueError, "step must be positive, not 0"),
        (spec.slice_member("raw", axis=0, start=0, end=1), {}, ValueError, "does not support slicing"),
        (spec.slice_member("text", axis=0, start=0, end=1), {}, ValueError, "does not support slicing"),
        (spec.slice_member("scalar", axis=0, start=0, end=1), {}, ValueError, "has no rows to choose"),
        (spec.select_members([]), {}, ValueError, "selected no members"),
        (spec.select_members(["table", "b"]), {}, KeyError, "no member 'b'; it has table, scalar, raw, text"),
        (spec.slice_member("b", 0, 0, 1), {}, KeyError, "no member 'b'"),
        (spec, {"b": locked}, KeyError, "no member 'b'"),
        (two, {"table": np.zeros((3, 8), np.int16)}, ValueError, r"shape \[2, 8\]"),
        (two, {"table": np.zeros((2, 8), np.int32)}, ValueError, "type <i2"),
        (two, {"table": locked}, ValueError, "contiguous"),
        (two, {"table": raw_destination(1, 8, None)}, ValueError, "32 bytes, but its destination 8"),
        (spec, {"table": tensor_object_buffer(1, 8, None)}, ValueError, "no tensor object"),
        (spec, {"raw": bytearray(3)}, ValueError, "cannot be read into a destination"),
        (transfer.read_spec({}), {}, ValueError, "no handle of a bundle"),
        (transfer.read_spec({"manifest_key": "rl/default/x/manifest"}), {}, RuntimeError, "gone from the pool"),
        (transfer.read_spec(transfer.put_bundle(b"meta", {})), {}, ValueError, "no structured object"),
    ]
    for wanted, destinations, error, words in cases:
        with pytest.raises(error, match=words):
            transfer.materialize_into(wanted, destinations)


def test_objects_of_any_kind(transfer, keys):
    cases = [TABLE, b"abc", "é", 7, None, [1, (2, b"x")], {"a": TABLE, "b": [1, "x"], "c": b""}]
    for given in cases:
        ref = transfer.put_object(given, partition="p", chunk_bytes=50)
        got = transfer.get_object(ref)
        if isinstance(given, np.ndarray):
            assert np.array_equal(got, given)
        elif isinstance(given, dict):
            assert list(got) == list(given)
            assert np.array_equal(got["a"], TABLE)
            assert (got["b"], got["c"]) == ([1, "x"], b"")
        else:
            assert (type(got), got) == (type(given), given)
        assert transfer.release_result(got) is None
        transfer.remove_bundle(ref)
        assert keys() == []
        with pytest.raises(RuntimeError, match="cannot be read"):
            transfer.get_object(ref)


@in_dictionary
def test_what_cannot_be_stored(transfer, keys):
    strict = BundleTransferPolicy(copy_mode="zero_copy")
    records = np.zeros(2, [("x", "i4"), ("y", "f4")])
    cases = [
        (lambda: transfer.put_bundle(b"m", {"bad/name": b"x"}), ValueError, "buffer name 'bad/name'"),
        (lambda: transfer.put_bundle(b"m", {"": b"x"}), ValueError, "buffer name ''"),
        (lambda: transfer.put_bundle(b"m", {"a": b"x"}, partition="a/b"), ValueError, "partition 'a/b'"),
        (lambda: transfer.put_bundle("m", {}), TypeError, "'meta' is str"),
        (lambda: transfer.put_bundle(b"m", {"a": 3}), TypeError, "'a' is int"),
        (lambda: transfer.put_bundle(b"m", {"a": TABLE.T}), TypeError, "contiguous"),
        (lambda: transfer.put_bundle(b"m", {"a": np.array([None])}), TypeError, "plain data"),
        (lambda: transfer.put_bundle(b"m", {}, max_inflight_put=0), ValueError, "max_inflight_put must be positive"),
        (lambda: transfer.put_object({3: b"x"}), ValueError, "buffer name 3"),
        (lambda: transfer.put_object(object()), TypeError, "member 'value' has a builtins.object"),
        (lambda: transfer.put_object(records), TypeError, "give x, y by themselves"),
        (lambda: transfer.put_object("text", policy=strict), ValueError, "zero_copy forbids"),
        (lambda: transfer.put_structured_object(payload(["x"])), TypeError, "must be a mapping, not list"),
        (lambda: transfer.put_structured_object(payload({"x": object()})), TypeError, "JSON-serializable"),
        (
            lambda: transfer.put_structured_object(payload({"__mooncake_structured_fields__": {}})),
            ValueError,
            "reserved",
        ),
        (lambda: BundleTransferPolicy(put_mode="fast"), ValueError, "expected auto, batch or parallel"),
    ]
    for call, error, words in cases:
        with pytest.raises(error, match=words):
            call()
        assert keys() == []
    stored = transfer.read_spec(transfer.put_object(TABLE, policy=strict))
    assert transfer.materialize(stored).objects.keys() == {"value"}


@in_dictionary
def test_prefixes(pool):
    for prefix in ("", "/", None):
        with pytest.raises(ValueError, match="key_prefix"):
            MooncakeBundleTransfer(pool, key_prefix=prefix)
    assert MooncakeBundleTransfer(pool).put_bundle(b"", {}).manifest_key.startswith("bundle/default/")
    with pytest.raises(TypeError, match="a dict is no store: it has no put, remove"):
        MooncakeBundleTransfer({})


@in_dictionary
def test_manifests_are_not_believed(transfer, pool, keys):
    kept = transfer.put_bundle(b"kept", {"a": b"x"})
    ref = transfer.put_bundle(b"meta", {"a": b"abcdef"}, chunk_bytes=2)
    theirs = kept.manifest["buffers"]["a"]["chunks"]
    base = ref.manifest_key.removesuffix("/manifest")

    def changed(**with_):
        return {**ref.manifest, "buffers": {"a": {**ref.manifest["buffers"]["a"], **with_}}}

    cases = [
        (changed(chunks=[{"key": theirs[0]["key"], "bytes": 6}]), "out of the namespace"),
        (changed(key=theirs[0]["key"], chunks=theirs, bytes=1), "out of the namespace"),
        (changed(bytes=7), "chunks of 6 bytes, but says 7"),
        (changed(bytes=-1), "has -1 bytes"),
        (changed(chunks=[{"key": f"{base}/buffer/a", "bytes": 3}] * 2), "or twice"),
        (changed(chunks=None), "no list of chunks"),
        ({**ref.manifest, "version": 2}, "expected version 1"),
        ({**ref.manifest, "buffers": []}, "mapping of buffers"),
        ({**ref.manifest, "meta": None}, "no list of chunks"),
        ([], "expected version 1"),
    ]
    before = keys()
    for number, (manifest, words) in enumerate(cases):
        key = f"rl/default/{number}/manifest"
        assert pool.put(key, json.dumps(manifest).encode()) == 0
        for call in (lambda ref: transfer.materialize(transfer.read_spec(ref)), transfer.remove_bundle):
            with pytest.raises(ValueError, match=words):
                call({"manifest_key": key})
            if manifest:
                with pytest.raises(ValueError, match=words):
                    call(RemoteBundleRef(key, manifest))
    assert pool.put("rl/default/text/manifest", b"text") == 0
    with pytest.raises(ValueError, match="is not JSON"):
        transfer.remove_bundle({"manifest_key": "rl/default/text/manifest"})
    with pytest.raises(ValueError, match="'rl/other/manifest' is not that of the manifest"):
        transfer.remove_bundle(RemoteBundleRef("rl/other/manifest", ref.manifest))
    assert set(before) <= set(keys())


@in_dictionary
def test_descriptions_are_not_believed(transfer):
    """Of members, in metadata that somebody else wrote."""
    cases = [
        ({"encoding": "pickle"}, "unsupported structured field encoding, 'pickle'"),
        ("bytes", "unsupported structured field encoding"),
        ({"encoding": "ndarray", "dtype": "<i2", "shape": [4]}, "6 bytes, which are not the shape"),
        ({"encoding": "ndarray", "dtype": "O", "shape": [1]}, "no type and shape"),
        ({"encoding": "ndarray", "dtype": "nonsense", "shape": [6]}, "no type and shape"),
        ({"encoding": "ndarray", "dtype": "u1", "shape": [-6]}, "no type and shape"),
        ({"encoding": "ndarray", "dtype": "u1"}, "no type and shape"),
    ]
    for says, words in cases:
        meta = {"layout": "structured", "__mooncake_structured_fields__": {"a": says}}
        ref = transfer.put_bundle(json.dumps(meta).encode(), {"a": b"abcdef"})
        with pytest.raises(ValueError, match=words):
            transfer.materialize(transfer.read_spec(ref))
    pickled = transfer.put_bundle(b"", {"a": b"abcdef"}).manifest
    pickled["buffers"]["a"]["format"] = "torch_save"
    meta = json.dumps({"__mooncake_structured_fields__": {"a": {"encoding": "torch_tensor"}}}).encode()
    pickled["meta"] = transfer.put_bundle(meta, {}).manifest["meta"]
    pickled["object_id"] = "default"  # both are below it
    with pytest.raises(ValueError, match="'torch_save', which is not read: nothing is unpickled"):
        transfer.materialize(transfer.read_spec(RemoteBundleRef("rl/default/manifest", pickled)))


def test_full_pool_keeps_nothing_of_it(store, master):
    transfer = MooncakeBundleTransfer(store)
    with pytest.raises(RuntimeError, match=r"could not be stored: NO_AVAILABLE_HANDLE \(-200\)"):
        transfer.put_object({"small": b"x", "large": np.zeros(80 << 20, np.uint8)}, chunk_bytes=4 << 20)
    assert master.get("/get_all_keys").split() == []


def test_puts_that_fail_in_the_middle_keep_nothing():
    values = Dictionary()
    transfer = MooncakeBundleTransfer(values)
    for puts in range(4):  # metadata, two chunks and the manifest
        values.puts_left = puts
        with pytest.raises(RuntimeError, match="no more puts"):
            transfer.put_bundle(b"meta", {"a": bytes(3)}, chunk_bytes=2)
        assert values.values == {}
    values.puts_left = 4
    assert len(transfer.put_bundle(b"meta", {"a": bytes(3)}, chunk_bytes=4).manifest["buffers"]["a"]["chunks"]) == 1


def test_a_removal_that_fails_hides_no_error():
    class Full(Dictionary):
        def remove(self, key, force=False):
            raise OSError("no removal either")

    values = Full()
    values.puts_left = 1
    with pytest.raises(RuntimeError, match="no more puts") as raised:
        MooncakeBundleTransfer(values).put_bundle(b"meta", {"a": b"x"})
    assert raised.value.__notes__ == ["what had been stored of it may be there still: no removal either"]


def test_configuration_of_the_values(pool):
    config = ReplicateConfig()
    config.with_hard_pin = True
    transfer = MooncakeBundleTransfer(pool)
    assert transfer.get_object(transfer.put_structured_object(payload(a=b"x"), config=config)) == {"a": b"x"}
    if isinstance(pool, Dictionary):
        assert pool.configs == [config] * 3
