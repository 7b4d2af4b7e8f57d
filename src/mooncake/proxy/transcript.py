"""What a stream has brought so far, remembered so that it can be resumed.

Blocks are only kept while the stream runs; they are read when it is lost, or when they have become many.
"""

from typing import Any

import msgspec

from mooncake.proxy import events

_READ_AT = 64 << 10  # bytes kept unread
_CLOSED_AT = 8 << 10  # bytes after which a stream that cannot be resumed is no longer remembered


class _Delta(msgspec.Struct):
    content: str | None = None
    tool_calls: list[Any] | None = None
    function_call: dict[str, Any] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class _Event(msgspec.Struct):
    id: str = ""
    object: str | None = None
    created: int = 0
    model: str = ""
    system_fingerprint: str | None = None
    choices: list[_Choice] = []
    prompt_token_ids: list[int] | None = None
    usage: dict[str, Any] | None = None


_decode = msgspec.json.Decoder(_Event).decode


class Transcript:
    """The events of one client's answer, over all instances that took part in it."""

    def __init__(self, *, whole: bool) -> None:
        """`whole`: remember everything; otherwise only whether anything of substance was emitted."""
        self.text = ""
        self.prompt_ids: list[int] | None = None
        self.token_ids: list[int] | None = []  # as far as `text` goes; None if the engine does not tell
        self.count = 0  # tokens as far as `text` goes; a guess where the engine does not tell
        self.sent = 0  # tokens that went to the client when a stream was lost, with text or not (yet)
        self.finish_reason: str | None = None
        self.usage_sent = False
        self.done = False
        self.readable = True  # everything so far was plain text of one choice
        self.head: dict[str, Any] = {}  # id, object, created, model: the same in every event of one answer
        self._whole = whole
        self._pending_ids: list[int] = []  # of events that brought no text (yet)
        self._blocks: list[bytes] = []
        self._size = 0
        self._closed = False

    def add(self, block: bytes) -> None:
        """Whole events that went to the client (with the token ids that may have been taken out of them)."""
        if self._closed:
            return
        self._blocks.append(block)
        self._size += len(block)
        if self._size > (_READ_AT if self._whole else _CLOSED_AT):
            self.read()
            if not self._whole:
                self._closed = True
                self.readable = False

    def settle(self) -> None:
        """The stream is lost.  Tokens without text are dropped: whoever goes on makes them again.

        Half a character has no text yet, and only the instance that made the first half can tell the whole.
        """
        self.read()
        self.sent = max(self.sent, self.count + len(self._pending_ids))
        if self.finish_reason is not None:
            self.count += len(self._pending_ids)
        self._pending_ids.clear()

    def read(self) -> None:
        """Bring `text` and the rest up to date with what was added."""
        blocks, self._blocks, self._size = self._blocks, [], 0
        for data in events.data_of(b"".join(blocks)):
            if data == b"[DONE]":
                self.done = True
                continue
            try:
                self._note(_decode(data))
            except msgspec.DecodeError:
                self.readable = False

    def _note(self, event: _Event) -> None:
        if not self.head:
            head = {"id": event.id, "object": event.object, "created": event.created, "model": event.model}
            head["system_fingerprint"] = event.system_fingerprint
            self.head = {key: value for key, value in head.items() if value is not None}
        if event.usage is not None and not event.choices:
            self.usage_sent = True
        if event.prompt_token_ids is not None and self.prompt_ids is None:
            self.prompt_ids = event.prompt_token_ids
        for choice in event.choices:
            self._note_choice(choice)

    def _note_choice(self, choice: _Choice) -> None:
        if choice.index:
            self.readable = False
        if choice.prompt_token_ids is not None and self.prompt_ids is None:
            self.prompt_ids = choice.prompt_token_ids
        text = choice.text or ""
        if choice.delta is not None:
            text = choice.delta.content or ""
            delta = choice.delta
            if delta.tool_calls or delta.function_call or delta.reasoning or delta.reasoning_content:
                self.readable = False
        if choice.token_ids is not None:
            self._pending_ids += choice.token_ids
        if text:
            self.text += text
            if choice.token_ids is None:
                self.token_ids = None
                self.count += 1
            elif self.token_ids is not None:
                self.token_ids += self._pending_ids
                self.count += len(self._pending_ids)
            self._pending_ids.clear()
        self.finish_reason = choice.finish_reason or self.finish_reason
