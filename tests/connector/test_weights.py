"""What tells models apart: what is in their files, not what these are called."""

import json
import shutil
import struct

import numpy as np

from mooncake.vllm.weights import adapter_fingerprint, model_fingerprint


def write_tensors(path, tensors):
    header, at = {}, 0
    for name, array in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(array.shape), "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(array.tobytes() for array in tensors.values()))


def tensors(seed=1):
    random = np.random.default_rng(seed)
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in (("w", (300, 400)), ("scale", (1,)))}


def make(folder, values, **config):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    write_tensors(folder / "model.safetensors", values)
    return model_fingerprint(folder)


def test_the_same_files_in_any_folder_are_the_same_model(tmp_path):
    first = make(tmp_path / "a", tensors())
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    (tmp_path / "b" / "README.md").write_text("another text")
    (tmp_path / "b" / "config.json").write_text('{\n  "model_type":   "llama"\n}')
    assert model_fingerprint(tmp_path / "b") == first


def test_other_weights_are_another_model_though_all_names_and_shapes_agree(tmp_path):
    fingerprints = [make(tmp_path / "a", tensors(1)), make(tmp_path / "b", tensors(2))]
    nudged = tensors(1)
    nudged["scale"] = nudged["scale"] + 1  # a quantisation scale
    fingerprints.append(make(tmp_path / "c", nudged))
    fingerprints.append(make(tmp_path / "d", tensors(1), rope_theta=1e6))
    end = tensors(1)
    end["w"][-1, -1] += 1
    fingerprints.append(make(tmp_path / "e", end))
    fingerprints.append(make(tmp_path / "f", {"w2": tensors(1)["w"], "scale": tensors(1)["scale"]}))
    assert len(set(fingerprints)) == len(fingerprints)


def test_files_that_are_not_safetensors(tmp_path):
    for name, content in (("a", b"x" * 5_000_000), ("b", b"y" * 5_000_000)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "pytorch_model.bin").write_bytes(content)
    (tmp_path / "broken.safetensors").write_bytes(b"\xff" * 100)
    prints = {model_fingerprint(tmp_path / name) for name in ("a", "b", "broken.safetensors")}
    assert len(prints) == 3


def test_adapters_are_read_whole(tmp_path):
    for name, byte in (("a", 0), ("b", 1)):
        (tmp_path / name).mkdir()
        content = bytearray(300_000)
        content[123_456] = byte
        (tmp_path / name / "adapter_model.safetensors").write_bytes(content)
    shutil.copytree(tmp_path / "a", tmp_path / "c")
    prints = [adapter_fingerprint(tmp_path / name) for name in "abc"]
    assert prints[0] != prints[1]
    assert prints[0] == prints[2]
