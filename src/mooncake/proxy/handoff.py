"""How a request is split: what the prefill half and the decode half say to each other through kv_transfer_params.

Straight (vLLM's MooncakeConnector): one transfer id a request; decode asks the engine that its parameters name, so both
halves are sent at once.  Through the pool: prefill first; whatever kv_transfer_params its answer has go to decode.
"""

import re
from typing import Any

import msgspec

from mooncake.proxy.config import Connector
from mooncake.proxy.instances import Instance

Body = dict[str, Any]

# What must not shape the prefill's single token: a stop token there would end it as "stopped", and MooncakeConnector
# sends only what ended by its length; min_tokens above max_tokens is refused.
_NOT_FOR_PREFILL = (
    "stop", "stop_token_ids", "min_tokens", "stream_options", "best_of", "logprobs", "top_logprobs", "return_token_ids",
)  # fmt: skip
_PARAMS = re.compile(rb'"kv_transfer_params"\s*:\s*\{')

_ENDED_EARLY = re.compile(rb'"finish_reason"\s*:\s*"(?:stop|abort|error)"')


class _PrefillAnswer(msgspec.Struct):
    kv_transfer_params: dict[str, Any] | None = None


def is_straight(instance: Instance, connector: Connector) -> bool:
    if connector is Connector.AUTO:
        return instance.bootstrap_port is not None
    return connector is Connector.MOONCAKE


def has_one_sequence(body: Body) -> bool:
    """Whether the engine makes one sequence of it: one transfer id can hand over only one."""
    if body.get("n") not in (None, 1) or body.get("best_of") not in (None, 1) or body.get("use_beam_search"):
        return False
    prompt = body.get("prompt")
    return not isinstance(prompt, list) or len(prompt) <= 1 or isinstance(prompt[0], int)


def prefill_body(body: Body, params: Body) -> Body:
    """The prefill half: the same prompt, one token, nothing streamed."""
    half = {key: value for key, value in body.items() if key not in _NOT_FOR_PREFILL}
    half.update(stream=False, max_tokens=1, ignore_eos=True, kv_transfer_params=params)
    if "max_completion_tokens" in half:
        half["max_completion_tokens"] = 1
    if "n" in half:
        half["n"] = 1
    return half


def straight_params(transfer: str) -> Body:
    return {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer}


def straight_decode_params(transfer: str, bootstrap: str, engine: str) -> Body:
    return {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "transfer_id": transfer,
        "remote_bootstrap_addr": bootstrap,
        "remote_engine_id": engine,
    }


def pool_params() -> Body:
    return {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }


def hands_over(answer: bytes) -> bool:
    """Whether a straight prefill half ended as it must for its engine to send: by its length."""
    return not _ENDED_EARLY.search(answer)


def returned_params(answer: bytes) -> Body | None:
    """The kv_transfer_params of a prefill's answer."""
    if not _PARAMS.search(answer):
        return None
    try:
        return msgspec.json.decode(answer, type=_PrefillAnswer).kv_transfer_params
    except msgspec.DecodeError:
        return None


def prompt_key(body: Body, length: int) -> bytes:
    """The prompt's beginning, by which prefix_affinity chooses."""
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return prompt[:length].encode(errors="surrogatepass")
    if prompt is not None:
        return msgspec.json.encode(prompt[:length] if isinstance(prompt, list) else prompt)[: 8 * length]
    key = ""
    messages = body.get("messages")
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else message
        key += content if isinstance(content, str) else msgspec.json.encode(content).decode()
        if len(key) >= length:
            break
    return key[:length].encode(errors="surrogatepass")
