"""Connectors for vLLM, named in its `--kv-transfer-config` with `"kv_connector_module_path": "mooncake.vllm"`.

Importing this imports nothing; a class is loaded when vLLM asks for it by name, and that needs vLLM.
"""

import importlib
from typing import Any

_CLASSES = {  # where each is, and its name there
    "MooncakeConnector": ("mooncake.vllm.push.connector", "MooncakeConnector"),
    "MooncakeStoreConnector": ("mooncake.vllm.connector", "MooncakeStoreConnector"),
    "InTreeMooncakeConnector": ("mooncake.vllm.intree", "MooncakeConnector"),
}


def __getattr__(name: str) -> Any:
    if name not in _CLASSES:
        raise AttributeError(f"mooncake.vllm has no {name}: it has {', '.join(_CLASSES)}.")
    module, there = _CLASSES[name]
    try:
        return getattr(importlib.import_module(module), there)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("vllm", "torch"):
            raise
        lacks = f"this environment lacks the module {error.name}"
        raise ImportError(f"mooncake.vllm.{name} runs inside of vLLM, but {lacks}: install that vLLM.") from None
