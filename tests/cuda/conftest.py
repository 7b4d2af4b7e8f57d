"""Fixtures: the stand-in for the CUDA driver (driver.c), and worker processes that have loaded it."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.processes import SETUP, Worker

SOURCE = Path(__file__).with_name("driver.c")

GPU = """
import ctypes, random, sys
import numpy as np
sys.path.insert(0, root)
cuda = ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
cuda.fake_allocate.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
for name in ("fake_write", "fake_read"):
    getattr(cuda, name).argtypes = [ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t]
cuda.fake_free.argtypes = [ctypes.c_uint64]

def device_memory(size, gpu=0):
    address = ctypes.c_uint64()
    code = cuda.fake_allocate(ctypes.byref(address), size, gpu)
    assert code == 0, code
    return address.value

def fill(address, data):
    data = bytes(data)
    code = cuda.fake_write(address, data, len(data))
    assert code == 0, code

def content(address, size):
    out = ctypes.create_string_buffer(size)
    assert cuda.fake_read(address, out, size) == 0
    return out.raw

def noise(size, seed=0):
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8).tobytes()

def sound():
    "The caller's context and mode of stream capture are as they were, and no kernel has touched what is not there."
    return [cuda.fake_depth(), cuda.fake_mode(), cuda.fake_dead()] == [0, 0, 0]
"""


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("the stand-in for the CUDA driver needs a C compiler")
    target = tmp_path_factory.mktemp("cuda") / "libcuda.so.1"
    subprocess.run(
        [compiler, "-O1", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", target, SOURCE, "-lpthread"], check=True
    )
    return target


@pytest.fixture(params=["late", "at once"])
def pace(request, monkeypatch):
    """When queued work is done."""
    if request.param == "at once":
        monkeypatch.setenv("FAKE_CUDA_EAGER", "1")
    else:
        monkeypatch.delenv("FAKE_CUDA_EAGER", raising=False)


@pytest.fixture
def make_gpu_worker(library, cleanup):
    """A process with GPUs, and a store too if `master` is given."""

    def make(master=None, segment: int = 64 << 20, **environment) -> Worker:
        worker = Worker(env={name: str(value) for name, value in environment.items()})
        cleanup.callback(worker.close)
        worker(GPU, library=str(library), root=str(SOURCE.parent.parent.parent))
        if master is not None:
            code = worker(SETUP, host="127.0.0.1", segment=segment, buffer=32 << 20, master=master.address)
            assert code == 0, f"setup returned {code}"
        return worker

    return make
