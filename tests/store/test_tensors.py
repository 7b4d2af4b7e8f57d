"""Runs tensor_cases.py where torch is: in the vLLM environment; and what of the tensor calls needs no torch, here."""

import ast
import re
import struct
from pathlib import Path

import numpy as np
import pytest

from mooncake.store.tensors.header import DTYPES, Header, ShardAxis, unpack
from tests.e2e.servers import vllm_python
from tests.processes import Worker

HERE = Path(__file__).parent
CASES = [
    node.name
    for node in ast.parse((HERE / "tensor_cases.py").read_text()).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("case_")
]


@pytest.fixture(scope="module")
def torch_worker(tmp_path_factory):
    python = vllm_python()
    if python is None:
        pytest.skip("there is no vLLM environment, and with it no torch; `scripts/install --vllm` makes it")
    worker = Worker(python=str(python))
    worker(
        "import os, sys; sys.path.insert(0, root); os.chdir(folder); from tests.store import tensor_cases",
        root=str(HERE.parents[1]),
        folder=str(tmp_path_factory.mktemp("tensors")),
    )
    yield worker
    worker.close()


@pytest.mark.vllm
@pytest.mark.parametrize("case", CASES)
def test_in_the_environment_with_torch(torch_worker, master, case):
    torch_worker(
        """
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert store.setup("127.0.0.1", "P2PHANDSHAKE", 16 << 20, 16 << 20, "tcp", "", master) == 0
try:
    getattr(tensor_cases, case)(store)
finally:
    store.close()
""",
        master=master.address,
        case=case,
    )


@pytest.mark.vllm
def test_the_example_of_the_documents(torch_worker, master):
    text = (HERE.parents[1] / "docs/store.md").read_text()
    (example,) = re.findall(r"<<'PY'\n(import torch.*?)PY\n", text, re.DOTALL)
    torch_worker(example.replace("127.0.0.1:50051", master.address) + "store.close()")


def test_addresses_need_no_torch(store):
    header = Header(DTYPES.index("float32"), (4, 6), (4, 6))
    data = np.arange(24, dtype=np.float32)
    raw = np.frombuffer(bytearray(header.pack() + data.tobytes()), np.uint8)
    assert store.put_tensor_from("t", raw.ctypes.data, len(raw)) == 0
    assert store.put_tensor_with_tp_from("w", raw.ctypes.data, len(raw), 0, 2, 0) == 0
    assert store.get("w_tp_1")[304:] == data[12:].tobytes()
    assert store.put_tensor("x", data) == -600


@pytest.mark.parametrize("axes", [(), (ShardAxis(1, 1, 2, 0, 0, 3), ShardAxis(2, 0, 4, -1, 7, 0))])
def test_headers_are_read_as_they_were_written(axes):
    header = Header(12, (3, 5), (6, 5), axes)
    raw = header.pack()
    assert len(raw) == 304
    assert unpack(raw, 304 + 30) == header


@pytest.mark.parametrize(
    ("at", "form", "value"),
    [(0, "I", 1), (4, "H", 2), (6, "H", 303), (8, "i", 15), (8, "i", -1), (12, "i", 9), (24, "Q", 305), (32, "Q", 31),
     (104, "q", -3), (168, "I", 5)],
)  # fmt: skip
def test_what_is_no_header(at, form, value):
    raw = bytearray(Header(12, (3, 5), (3, 5)).pack())
    assert unpack(bytes(raw), 334) is not None
    struct.pack_into("<" + form, raw, at, value)
    assert unpack(bytes(raw), 334) is None
    assert unpack(b"", 0) is unpack(bytes(303), 303) is None
