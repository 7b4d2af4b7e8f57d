"""The documents' Python examples run as they stand."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mooncake.cli.engine_settings import (
    CONSUMER,
    PRODUCER,
    own_store_config,
    p2p_and_pool_config,
    p2p_config,
    transfer_config,
)
from mooncake.http_metadata_server import KVBootstrapServer

ROOT = Path(__file__).parents[2]
ADDRESS = "127.0.0.1:50051"


@pytest.mark.parametrize("name", ["README.md", "docs/quickstart.md"])
def test_python_examples(up, name):
    examples = re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.DOTALL)
    assert examples
    pool = up()
    for example in examples:
        assert ADDRESS in example
        program = example.replace(ADDRESS, f"127.0.0.1:{pool.port}")
        subprocess.run([sys.executable, "-c", program], timeout=30, check=True)


def test_store_examples(up):
    """Those of docs/store.md are one program."""
    program = "\n".join(re.findall(r"```python\n(.*?)```", (ROOT / "docs/store.md").read_text(), re.DOTALL))
    assert ADDRESS in program
    program = program.replace(ADDRESS, f"127.0.0.1:{up().port}")
    subprocess.run([sys.executable, "-c", program], timeout=60, check=True)


def test_engine_example():
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/engine.md").read_text(), re.DOTALL)
    subprocess.run([sys.executable, "-c", example], timeout=30, check=True)


def test_transfer_configs():
    """The JSON texts of docs/vllm.md are those that the commands print."""
    texts = re.findall(r"--kv-transfer-config '(.*?)'", (ROOT / "docs/vllm.md").read_text(), re.DOTALL)
    expected = [
        transfer_config(1),
        p2p_config(PRODUCER),
        p2p_config(CONSUMER),
        p2p_and_pool_config(PRODUCER, 1),
        p2p_and_pool_config(CONSUMER, 2),
        own_store_config(),
        own_store_config(shared_tp=4),
    ]
    assert [json.loads(text) for text in texts] == [json.loads(text) for text in expected]


def test_metadata_example(cleanup):
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/metadata.md").read_text(), re.DOTALL)
    server = KVBootstrapServer(0, "127.0.0.1")
    server.run()
    cleanup.callback(server.close)
    program = example.replace("127.0.0.1:8080", f"127.0.0.1:{server.port}")
    assert program != example
    subprocess.run([sys.executable, "-c", program], timeout=30, check=True)


def test_links_lead_somewhere():
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"
