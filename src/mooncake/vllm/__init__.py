"""Connectors for vLLM, named in its `--kv-transfer-config` with `"kv_connector_module_path": "mooncake.vllm"`.

Importing this imports nothing; a class is loaded when vLLM asks for it by name, and that needs vLLM.
"""

import importlib
from typing import Any

_MODULES = {
    "MooncakeConnector": "mooncake.vllm.p2p",
    "MooncakeStoreConnector": "mooncake.vllm.connector",
}


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"mooncake.vllm has no {name}: it has {', '.join(_MODULES)}.")
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("vllm", "torch"):
            raise
        lacks = f"this environment lacks the module {error.name}"
        raise ImportError(f"mooncake.vllm.{name} runs inside of vLLM, but {lacks}: install that vLLM.") from None
