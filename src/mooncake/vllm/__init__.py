"""vLLM's connectors to a pool: `"kv_connector_module_path": "mooncake.vllm"` with the name of a class of this package.

Importing the package costs nothing; a class is imported when vLLM asks for it.
"""

from importlib import import_module
from typing import Any

_CLASSES = {
    "MooncakeStoreConnector": "mooncake.vllm.connector",
}


def __getattr__(name: str) -> Any:
    module = _CLASSES.get(name)
    if module is None:
        raise AttributeError(f"mooncake.vllm has no {name!r}; it has {', '.join(_CLASSES)}")
    return getattr(import_module(module), name)
