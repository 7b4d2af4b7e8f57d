"""Asks a vLLM instance over its OpenAI-style API and takes the time until the first token arrives."""

import http.client
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mooncake.cli.loopback import HOST, fetch, metric
from mooncake.demo.servers import MODEL_ALIAS, Instance
from mooncake.errors import MooncakeError

LIMIT = 300.0  # seconds without a byte


class NoAnswer(MooncakeError):
    """An instance answered with an error, or not at all."""


@dataclass(frozen=True)
class Answer:
    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    first_token_s: float  # seconds from sending the request to the first token


def ask(instance: Instance, messages: list[dict[str, str]], max_tokens: int, **more: str) -> Answer:
    """One streamed, greedy chat completion; `more` goes into the request as it is."""
    request = {
        "model": MODEL_ALIAS,
        "messages": messages,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        **more,
    }
    text, prompt_tokens, first = "", 0, None
    token_ids: list[int] = []
    start = time.perf_counter()
    for event in _events(instance, request):
        if usage := event.get("usage"):
            prompt_tokens = usage["prompt_tokens"]
        for choice in event["choices"]:
            if first is None and choice.get("token_ids"):
                first = time.perf_counter() - start
            token_ids += choice.get("token_ids") or []
            text += choice["delta"].get("content") or ""
    if first is None:
        raise NoAnswer(f"{instance.child.name} sent no token")
    return Answer(text, tuple(token_ids), prompt_tokens, first)


def tokens_from_pool(instance: Instance) -> int:
    """Prompt tokens that the instance has loaded from the pool since it started."""
    return int(metric(fetch(instance.port, "/metrics") or "", "vllm:external_prefix_cache_hits_total"))


def _events(instance: Instance, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The server-sent events of one request, decoded as they arrive."""
    connection = http.client.HTTPConnection(HOST, instance.port, timeout=LIMIT)
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(request), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise NoAnswer(f"{instance.child.name} answered {answer.status}: {answer.read().decode(errors='replace')}")
        for line in answer:
            if line.startswith(b"data: {"):
                event = json.loads(line.removeprefix(b"data: "))
                if "error" in event:
                    raise NoAnswer(f"{instance.child.name} answered {event['error']}")
                yield event
    except (OSError, http.client.HTTPException) as error:
        raise NoAnswer(f"{instance.child.name} broke off ({error!r})") from error
    finally:
        connection.close()
