"""What one vLLM instance is set to, learned from whatever tells it.

Sources, the first that tells a setting wins: `/server_info` (only with VLLM_SERVER_DEV_MODE=1), the labels of
`vllm:cache_config_info` in `/metrics`, `/v1/models` and `/version`, and for instances of this host the command line
and environment of the process that listens.  What no source tells stays unknown; defaults are only assumed for a
command line that was seen whole.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from mooncake.doctor import processes, web

UNSET = "not set"

# Settings by name; what /server_info calls them (section, field).
_SERVER_INFO = {
    "model": ("model_config", "model"),
    "dtype": ("model_config", "dtype"),
    "quantization": ("model_config", "quantization"),
    "revision": ("model_config", "revision"),
    "block size": ("cache_config", "block_size"),
    "hash block size": ("cache_config", "hash_block_size"),
    "hash algorithm": ("cache_config", "prefix_caching_hash_algo"),
    "prefix caching": ("cache_config", "enable_prefix_caching"),
    "KV dtype": ("cache_config", "cache_dtype"),
    "KV layout": ("cache_config", "kv_cache_layout"),
    "tensor parallel": ("parallel_config", "tensor_parallel_size"),
    "pipeline parallel": ("parallel_config", "pipeline_parallel_size"),
    "prefill context parallel": ("parallel_config", "prefill_context_parallel_size"),
    "decode context parallel": ("parallel_config", "decode_context_parallel_size"),
    "data parallel": ("parallel_config", "data_parallel_size"),
}
_METRIC_LABELS = {
    "block_size": "block size",
    "hash_block_size": "hash block size",
    "prefix_caching_hash_algo": "hash algorithm",
    "enable_prefix_caching": "prefix caching",
    "cache_dtype": "KV dtype",
    "kv_cache_layout": "KV layout",
}
_IDENTITY_LABELS = {"keys": "key identity", "seed": "hash seed"}  # of mooncake.vllm, once it has served a request
# Flags that set them, and what vLLM takes when the flag is not there (None: it depends on model and machine).
_FLAGS: dict[str, tuple[tuple[str, ...], str | None]] = {
    "model": (("--model",), None),
    "dtype": (("--dtype",), "auto"),
    "quantization": (("--quantization", "-q"), None),
    "revision": (("--revision",), "None"),
    "block size": (("--block-size",), None),
    "hash algorithm": (("--prefix-caching-hash-algo",), None),
    "KV dtype": (("--kv-cache-dtype",), "auto"),
    "tensor parallel": (("--tensor-parallel-size", "-tp"), "1"),
    "pipeline parallel": (("--pipeline-parallel-size", "-pp"), "1"),
    "prefill context parallel": (("--prefill-context-parallel-size", "-pcp"), "1"),
    "decode context parallel": (("--decode-context-parallel-size", "-dcp"), "1"),
    "data parallel": (("--data-parallel-size", "-dp"), "1"),
}
_NOTHING = (None, "", "None")
_TITLE = "VLLM::"


@dataclass
class Instance:
    """`known`: settings by name; `told_by`: which source told each; `missing`: sources that could not be read, why."""

    url: str
    known: dict[str, str] = field(default_factory=dict)
    told_by: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    answers: bool = False
    is_vllm: bool = False
    pid: int = 0  # of the listener, if it is on this host and may be looked at
    connectors: list[dict[str, Any]] | None = None  # None: unknown
    cpp_library: str = ""  # the C++ wheel's, if it is loaded

    @property
    def name(self) -> str:
        return urlsplit(self.url).netloc or self.url

    def tell(self, source: str, settings: Mapping[str, Any]) -> None:
        """Take over what is not known yet."""
        for name, value in settings.items():
            if name not in self.known and value is not None:
                self.known[name] = str(value)
                self.told_by[name] = source

    @property
    def store(self) -> dict[str, Any] | None:
        """The settings of its MooncakeStoreConnector; None if it has none, or if that is not known."""
        return next((one for one in self.connectors or () if "MooncakeStore" in str(one.get("kv_connector"))), None)

    @property
    def has_own_store(self) -> bool:
        """Whether that is mooncake.vllm's: its settings say so, or it tells of its keys."""
        return "key identity" in self.known or (self.store or {}).get("kv_connector_module_path") == "mooncake.vllm"


def learn(url: str, limit: float) -> Instance:
    """Ask every source, each for `limit` seconds at most."""
    instance = Instance(url.rstrip("/"))
    sources: list[tuple[str, Callable[[Instance, float], None]]] = [
        ("/server_info", _read_server_info),
        ("/metrics", _read_metrics),
        ("/v1/models", _read_models),
        ("/version", _read_version),
    ]
    for name, read in sources:
        try:
            read(instance, limit)
            instance.answers = True
        except web.StatusError as error:
            instance.answers = True
            instance.missing[name] = _why(name, error)
        except web.NoAnswerError as error:
            instance.missing[name] = str(error)
            if not instance.answers:
                break  # nobody is there: the other routes would say the same
    _read_process(instance)
    return instance


def _why(name: str, error: web.StatusError) -> str:
    if name == "/server_info" and error.status == 404:
        return "needs VLLM_SERVER_DEV_MODE=1"
    return str(error)


def _read_server_info(instance: Instance, limit: float) -> None:
    config = web.get_json(f"{instance.url}/server_info?config_format=json", limit).get("vllm_config")
    if not isinstance(config, dict):
        raise web.NoAnswerError("this vLLM tells its settings as text only")
    told = {}
    for name, (section, key) in _SERVER_INFO.items():
        part = config.get(section)
        if isinstance(part, dict) and key in part and (part[key] is not None or name in ("quantization", "revision")):
            told[name] = str(part[key]).removeprefix("torch.")
    instance.tell("/server_info", told)
    instance.connectors = connectors_of(config.get("kv_transfer_config"))


def _read_metrics(instance: Instance, limit: float) -> None:
    text = web.get(f"{instance.url}/metrics", limit)
    for family in text_string_to_metric_families(text):
        instance.is_vllm = instance.is_vllm or family.name.startswith("vllm:")
        if family.name == "vllm:cache_config_info":
            for sample in family.samples[:1]:
                labels = {name: sample.labels.get(label) for label, name in _METRIC_LABELS.items()}
                instance.tell("/metrics", {name: value for name, value in labels.items() if value not in _NOTHING})
            instance.tell("/metrics", {"engines": len(family.samples)})
        if family.name == "vllm:mooncake_identity_info":
            for label, name in _IDENTITY_LABELS.items():
                values = sorted({sample.labels.get(label, "") for sample in family.samples})
                instance.tell("/metrics", {name: " and ".join(values)})
    if "engines" not in instance.known:
        raise web.NoAnswerError("has no vllm:cache_config_info")


def _read_models(instance: Instance, limit: float) -> None:
    models = web.get_json(f"{instance.url}/v1/models", limit)
    for model in models.get("data", [])[:1]:
        instance.tell("/v1/models", {"served as": model.get("id"), "model": model.get("root")})


def _read_version(instance: Instance, limit: float) -> None:
    instance.tell("/version", {"vLLM": web.get_json(f"{instance.url}/version", limit).get("version")})


# ------------------------------------------------------------ the process


def _read_process(instance: Instance) -> None:
    parts = urlsplit(instance.url)
    if not processes.is_local(parts.hostname or ""):
        instance.missing["its process"] = "it is on another host"
        return
    pids = processes.listeners(parts.port or 80)
    if not pids:
        instance.missing["its process"] = "nothing listens there"
        return
    found = processes.process(pids[0]) if pids[0] else None
    if found is None or not found.command:
        instance.missing["its process"] = "it belongs to another user or container"
        return
    if found.command[0].startswith(_TITLE):  # it has written its title over its command line
        found = processes.process(found.parent) or found
    if not _is_vllm(found.command):  # a tunnel, a container's forwarder, a program that forked it
        instance.missing["its process"] = f"who listens there is no vLLM: pid {found.pid}, {found.name}"
        return
    instance.pid = found.pid
    if found.command[0].startswith(_TITLE):
        instance.missing["its command line"] = "it has written its title over it"
    else:
        _read_command(instance, found.command)
    if found.environment:
        seed = found.environment.get("PYTHONHASHSEED", UNSET)
        instance.tell(f"the environment of pid {found.pid}", {"PYTHONHASHSEED": seed})
        pool = _pool_of(found.environment)
        instance.tell(f"the environment of pid {found.pid}", pool)
        if not pool:
            instance.missing["MOONCAKE_CONFIG_PATH"] = "not in its environment"
    else:
        instance.missing["its environment"] = f"/proc/{found.pid}/environ may not be read"
    instance.cpp_library = next(_cpp_libraries(found.pid), "")


def _read_command(instance: Instance, command: tuple[str, ...]) -> None:
    flags = dict(_flags(command))
    whole = "--config" not in flags
    if not whole:
        instance.missing["some flags"] = f"they are in the file {flags['--config']}"
    told: dict[str, str | None] = {}
    for name, (spellings, default) in _FLAGS.items():
        given = next((flags[flag] for flag in spellings if flag in flags), None)
        told[name] = given if given is not None else default if whole else None
    if told["model"] is None:
        told["model"] = _served_model(command)
    instance.tell(f"the command line of pid {instance.pid}", told)
    if instance.connectors is None and whole:
        text = flags.get("--kv-transfer-config", "")
        try:
            instance.connectors = connectors_of(json.loads(text) if text else None)
        except ValueError:
            instance.missing["--kv-transfer-config"] = "it is not JSON"


def _is_vllm(command: tuple[str, ...]) -> bool:
    """Whether this is a server's own command line: `vllm serve ...`, `python -m vllm...`, or vLLM's title."""
    return any(word.rpartition("/")[2] == "vllm" or word.startswith(("vllm.", _TITLE)) for word in command)


def _flags(command: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """(--flag, value) of a command line; the last of a name counts, as for argparse."""
    for word, following in zip(command, (*command[1:], ""), strict=True):
        if word.startswith("-"):
            name, equals, value = word.partition("=")
            name = "--" + name[2:].replace("_", "-") if name.startswith("--") else name
            yield name, value if equals else following


def _served_model(command: tuple[str, ...]) -> str | None:
    """MODEL of `vllm serve MODEL`."""
    for word, following in pairwise(command):
        if word == "serve" and not following.startswith("-"):
            return following
    return None


def _pool_of(environment: Mapping[str, str]) -> dict[str, str]:
    """The master that the instance's pool file or variable names."""
    path = environment.get("MOONCAKE_CONFIG_PATH", "")
    if not path:
        return {"master": environment["MOONCAKE_MASTER"]} if environment.get("MOONCAKE_MASTER") else {}
    try:
        content = json.loads(Path(path).read_text())
        return {"master": str(content["master_server_address"]), "pool file": path}
    except (OSError, ValueError, KeyError, TypeError):
        return {"pool file": path}


def _cpp_libraries(pid: int) -> Iterator[str]:
    """The C++ wheel's libraries that the process or one below it has loaded."""
    for one in (pid, *processes.descendants(pid)):
        try:
            maps = Path(f"/proc/{one}/maps").read_text()
        except OSError:
            continue
        for line in maps.splitlines():
            path = line.rpartition(" ")[2]
            folder, _, name = path.rpartition("/")
            if folder.endswith("/mooncake") and name.endswith(".so") and name.startswith(("store.", "engine.")):
                yield path


def connectors_of(config: Any) -> list[dict[str, Any]]:
    """The connectors of a --kv-transfer-config, those inside of a MultiConnector one by one."""
    if not isinstance(config, dict) or not config.get("kv_connector"):
        return []
    inner = (config.get("kv_connector_extra_config") or {}).get("connectors")
    if isinstance(inner, list):
        policy = {"kv_load_failure_policy": config.get("kv_load_failure_policy")}
        return [{**policy, **one} for one in inner if isinstance(one, dict)]
    return [config]
