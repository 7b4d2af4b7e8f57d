"""How a stream that was lost in the middle goes on elsewhere, so that the client sees one stream.

Only greedy sampling can be resumed: its next token depends on nothing but the tokens before it.  The new request is
the prompt plus what was emitted; its answer's events are rewritten to continue the old ones (same id, summed usage).

By tokens: /v1/completions with the prompt's and the emitted tokens' own ids, for chats too (their events are given the
chat's form): no template is applied and nothing is tokenized a second time.  By text, where the engine tells no ids:
prompt plus text, or the messages plus an unfinished one of the assistant (continue_final_message).
"""

from typing import Any

import msgspec

from mooncake.proxy import events
from mooncake.proxy.config import ResumeBy
from mooncake.proxy.errors import Broken
from mooncake.proxy.handoff import Body, has_one_sequence
from mooncake.proxy.transcript import Transcript

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
_DEFAULT_MAX_TOKENS = 16  # of /v1/completions; chats have no default

# State of the sampler that a new request would begin without.
_STATEFUL = (
    "presence_penalty", "frequency_penalty", "response_format", "structured_outputs", "guided_json", "guided_regex",
    "guided_choice", "guided_grammar", "echo", "prompt_logprobs", "include_stop_str_in_output", "thinking_token_budget",
    "truncate_prompt_tokens", "suffix",
)  # fmt: skip
_ONLY_CHAT = (
    "messages", "tools", "tool_choice", "parallel_tool_calls", "max_completion_tokens", "add_generation_prompt",
    "continue_final_message", "chat_template", "chat_template_kwargs", "documents", "logprobs", "top_logprobs",
    "reasoning_effort", "include_reasoning", "echo", "add_special_tokens", "mm_processor_kwargs", "media_io_kwargs",
)  # fmt: skip


def is_resumable(body: Body) -> bool:
    """Whether what follows the emitted tokens depends on nothing else."""
    if not body.get("stream") or body.get("temperature") != 0 or not has_one_sequence(body):
        return False
    if any(body.get(key) not in (None, False, 0, {"type": "text"}) for key in _STATEFUL):
        return False
    if body.get("logprobs") and "prompt" in body:
        return False  # text_offset counts from the prompt's end
    if body.get("stop") and (body.get("return_token_ids") or body.get("logprobs")):
        return False  # text lags behind what was told of its tokens: nobody knows by how many
    return not body.get("tools") or body.get("tool_choice") == "none"


def can_resume(body: Body, transcript: Transcript, resume_by: ResumeBy) -> bool:
    """Whether the answer to a resumable request, as far as it came, can be continued."""
    return transcript.readable and (_by_tokens(body, transcript, resume_by) or _by_text(body))


def remaining(body: Body, transcript: Transcript) -> int | None:
    """Tokens that may still come; None if the request sets no limit."""
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    if limit is None and "prompt" in body and "max_tokens" not in body:
        limit = _DEFAULT_MAX_TOKENS
    return int(limit) - transcript.count if isinstance(limit, int) else None


def resumption(body: Body, transcript: Transcript, resume_by: ResumeBy) -> tuple[str, Body]:
    """Path and body of the request that continues the answer."""
    path = CHAT if "messages" in body else COMPLETIONS
    if not transcript.text:
        return path, body
    left = remaining(body, transcript)
    rest = dict(body)
    if isinstance(body.get("min_tokens"), int):
        rest["min_tokens"] = max(0, body["min_tokens"] - transcript.count)
    if _by_tokens(body, transcript, resume_by):
        for key in _ONLY_CHAT:
            rest.pop(key, None)
        rest["prompt"] = [*_prompt_ids(body, transcript), *(transcript.token_ids or ())]
        rest["max_tokens"] = left
        return COMPLETIONS, rest
    if path == CHAT:
        rest["messages"] = [*body["messages"], {"role": "assistant", "content": transcript.text}]
        rest.update(add_generation_prompt=False, continue_final_message=True)
    else:
        rest["prompt"] = body["prompt"] + transcript.text
    if left is not None:
        rest["max_completion_tokens" if body.get("max_completion_tokens") else "max_tokens"] = left
    return path, rest


def _by_tokens(body: Body, transcript: Transcript, resume_by: ResumeBy) -> bool:
    """Where a stop string is looked for, text is held back and lags behind the ids."""
    return (
        resume_by is ResumeBy.TOKENS
        and bool(transcript.token_ids)
        and not body.get("stop")
        and not body.get("logprobs")
        and _is_text(body.get("messages"))
        and bool(_prompt_ids(body, transcript))
    )


def _is_text(messages: Any) -> bool:
    """Whether ids say all of it: an image's do not."""
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        parts = content if isinstance(content, list) else ()
        if any(not isinstance(part, dict) or part.get("type") != "text" for part in parts):
            return False
    return True


def _by_text(body: Body) -> bool:
    prompt = body.get("prompt")
    if "messages" not in body:
        return isinstance(prompt, str)
    messages = body["messages"]
    return isinstance(messages, list) and not body.get("continue_final_message")


def _prompt_ids(body: Body, transcript: Transcript) -> list[int]:
    prompt = body.get("prompt")
    if transcript.prompt_ids is not None:
        return transcript.prompt_ids
    return prompt if isinstance(prompt, list) and all(isinstance(token, int) for token in prompt) else []


def final_events(body: Body, transcript: Transcript) -> bytes:
    """The end of a stream of which only the end is missing."""
    made = b""
    if transcript.finish_reason is None:
        made += _event(body, transcript, "", "length")
    if (body.get("stream_options") or {}).get("include_usage") and not transcript.usage_sent and transcript.prompt_ids:
        event = {
            **transcript.head,
            "choices": [],
            "usage": _usage(len(transcript.prompt_ids), transcript.count),
        }
        made += b"data: " + msgspec.json.encode(event) + b"\n\n"
    return made + events.DONE + b"\n\n"


class Rewriter:
    """Turns the events of a resumption into the next ones of the stream that it continues."""

    def __init__(self, body: Body, transcript: Transcript) -> None:
        self._body = body
        self._transcript = transcript
        self._emitted = self._made = transcript.count
        self._keep_ids = bool(body.get("return_token_ids"))
        self._drop_role = "messages" in body and bool(transcript.head)

    def rewrite(self, block: bytes) -> bytes:
        try:
            return b"".join(self._rewritten(data) for data in events.data_of(block))
        except (msgspec.DecodeError, LookupError, TypeError, AttributeError) as error:
            raise Broken(f"the instance sent an event of unknown form ({error})") from None

    def _rewritten(self, data: bytes) -> bytes:
        if data == b"[DONE]":
            return events.DONE + b"\n\n"
        event: dict[str, Any] = msgspec.json.decode(data)
        for key in ("object", "system_fingerprint", "prompt_token_ids"):
            event.pop(key, None)
        event = {**event, **self._transcript.head}
        choices = [shaped for choice in event.get("choices") or () if (shaped := self._shaped(choice)) is not None]
        if event.get("choices") and not choices:
            return b""
        event["choices"] = choices
        usage = event.get("usage")
        if usage:
            total = usage["prompt_tokens"] + usage.get("completion_tokens", 0)
            prompt = usage["prompt_tokens"] - self._emitted
            event["usage"] = {**usage, **_usage(prompt, total - prompt)}
        return b"data: " + msgspec.json.encode(event) + b"\n\n"

    def _shaped(self, choice: dict[str, Any]) -> dict[str, Any] | None:
        """A choice in the form of the client's route; None if there is nothing new in it."""
        choice.pop("prompt_token_ids", None)
        known = self._drop_known(choice)
        if not self._keep_ids:
            choice.pop("token_ids", None)
        if "messages" in self._body and "text" in choice:
            choice = {"index": 0, "delta": {"content": choice.pop("text")}, **choice}
        delta = choice.get("delta")
        if delta and self._drop_role and delta.pop("role", None) and not delta.get("content"):
            return None if choice.get("finish_reason") is None else choice
        if known and not (choice.get("text") or (delta and delta.get("content")) or choice.get("finish_reason")):
            return None
        return choice

    def _drop_known(self, choice: dict[str, Any]) -> bool:
        """Take out what the client was told of tokens whose text was lost; whether no other token is left."""
        ids = choice.get("token_ids") or []
        known = min(len(ids), max(0, self._transcript.sent - self._made))
        self._made += len(ids)
        if not known:
            return False
        choice["token_ids"] = ids[known:]
        content = (choice.get("logprobs") or {}).get("content")
        if content:
            choice["logprobs"]["content"] = content[known:]
        return known == len(ids)


def _event(body: Body, transcript: Transcript, text: str, finish_reason: str) -> bytes:
    choice: dict[str, Any] = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}
    if "messages" in body:
        choice = {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": finish_reason}
    return b"data: " + msgspec.json.encode({**transcript.head, "choices": [choice]}) + b"\n\n"


def _usage(prompt: int, completion: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
