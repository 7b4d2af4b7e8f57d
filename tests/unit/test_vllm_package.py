"""`mooncake.vllm` where there is no vLLM: it can be imported, and says in one sentence what it lacks."""

import importlib.util
import subprocess
import sys

import pytest

import mooncake.vllm


def test_importing_the_package_imports_nothing_else():
    program = "import sys, mooncake.vllm; print([name for name in sys.modules if name in ('torch', 'vllm', 'numpy')])"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_an_unknown_connector():
    with pytest.raises(AttributeError, match=r"mooncake.vllm has no Mooncake: it has MooncakeConnector"):
        _ = mooncake.vllm.Mooncake


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here")
def test_without_vllm():
    with pytest.raises(ImportError, match=r"runs inside of vLLM, but this environment lacks the module \w+: install"):
        from mooncake.vllm import MooncakeConnector  # noqa: F401
