"""An engine for tests: OpenAI's routes, tokens that depend only on the tokens before them, and faults on demand.

    python -m tests.proxy.stub_engine PORT HOST

A token is a character.  The text of some tokens comes with the next one's, as halves of a character do.  POST /control
sets faults (`Faults`), GET /seen tells what was asked.  Its bootstrap server is itself; a decode half waits, like
MooncakeConnector's, until the prefill half that its kv_transfer_params name has been done, or for ever.
"""

import asyncio
import json
import os
import signal
import sys
import zlib
from dataclasses import asdict, dataclass

import aiohttp
from aiohttp import web

ALPHABET = "abcdefghij klmnop é漢🙂ß"
DEFAULT_CHAT_TOKENS = 40


@dataclass
class Faults:
    gap_ms: float = 1.0
    first_ms: float = 0.0  # before the first event, or the answer
    kill_after: int = -1  # events, then SIGKILL
    drop_after: int = -1  # events, then the connection is aborted
    hang_after: int = -1
    end_after: int = -1  # events, then the stream ends without [DONE]
    error_after: int = -1  # events, then an error event and [DONE], as vLLM does
    times: int = -1  # how often the faults above and `status` happen; -1 always
    status: int = 0
    health: int = 200
    split: int = 0  # bytes in one write
    ids: bool = True  # whether return_token_ids is known
    prefill_finish: str = "length"
    pulls: bool = True  # whether what a prefill half hands over can be fetched; otherwise 500
    sends: bool = True  # whether a prefill half is ever handed over
    returned_params: bool = False
    tokenize_ms: float = 0.0


def next_token(ids: list[int]) -> int:
    return ord(ALPHABET[zlib.crc32(repr(ids[-100:]).encode()) % len(ALPHABET)])


def is_held(token: int) -> bool:
    """Its text comes with the next token's."""
    return chr(token) in "é漢"


def generate(ids: list[int], count: int) -> list[int]:
    made: list[int] = []
    for _ in range(count):
        made.append(next_token(ids + made))
    return made


def text_of(ids: list[int]) -> str:
    return "".join(map(chr, ids))


def ids_of(text: str) -> list[int]:
    return list(map(ord, text))


def _content(message: dict) -> str:
    content = message["content"]
    return content if isinstance(content, str) else json.dumps(content)


def chat_text(body: dict) -> str:
    """The chat template."""
    text = "\n".join(f"{message['role']}: {_content(message)}" for message in body["messages"])
    return text if body.get("continue_final_message") else text + "\nassistant: "


class Engine:
    def __init__(self, port: int) -> None:
        self.name = f"engine-{port}-{os.getpid()}"
        self.faults = Faults()
        self.seen: list[dict] = []
        self.active = self.cancelled = self.tokenized = 0
        self.transfers: dict[str, asyncio.Event] = {}

    def faulty(self) -> bool:
        """Whether this request meets the faults."""
        if self.faults.times == 0:
            return False
        self.faults.times -= self.faults.times > 0
        return True

    async def health(self, _: web.Request) -> web.Response:
        return web.Response(status=self.faults.health)

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "stub", "object": "model"}]})

    async def control(self, request: web.Request) -> web.Response:
        self.faults = Faults(**{**asdict(self.faults), **await request.json()})
        return web.json_response({})

    async def reset(self, _: web.Request) -> web.Response:
        self.faults, self.seen, self.cancelled, self.tokenized = Faults(), [], 0, 0
        return web.json_response({"active": self.active})

    async def get_seen(self, _: web.Request) -> web.Response:
        counts = {"active": self.active, "cancelled": self.cancelled, "tokenized": self.tokenized}
        return web.json_response({"requests": self.seen, **counts})

    async def tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.tokenized += 1
        await asyncio.sleep(self.faults.tokenize_ms / 1000)
        tokens = ids_of(body["prompt"] if "prompt" in body else chat_text(body))
        return web.json_response({"count": len(tokens), "max_model_len": 1 << 20, "tokens": tokens})

    async def query(self, _: web.Request) -> web.Response:
        return web.json_response({"0": {"engine_id": self.name, "worker_addr": {"0": {"0": "tcp://127.0.0.1:1"}}}})

    async def transfer(self, request: web.Request) -> web.Response:
        """Answers when the prefill half of a transfer is done."""
        await self.transfers.setdefault(request.match_info["id"], asyncio.Event()).wait()
        return web.json_response({"engine_id": self.name})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.seen.append(
            {
                "path": request.path,
                "headers": {name.lower(): value for name, value in request.headers.items()},
                "body": body,
            }
        )
        self.active += 1
        try:
            return await self._answer(request, body)
        except (asyncio.CancelledError, ConnectionError):
            self.cancelled += 1
            raise
        finally:
            self.active -= 1

    async def _answer(self, request: web.Request, body: dict) -> web.StreamResponse:
        chat = request.path.endswith("chat/completions")
        faulty = self.faulty()
        if faulty and self.faults.status:
            error = {"error": {"message": "the stub says no", "type": "Stub", "code": self.faults.status}}
            return web.json_response(error, status=self.faults.status, headers={"X-Stub": "no"})
        prompt = ids_of(chat_text(body)) if chat else body["prompt"]
        prompt = ids_of(prompt) if isinstance(prompt, str) else prompt
        params = body.get("kv_transfer_params") or {}
        if params.get("do_remote_prefill") and not self.faults.pulls:
            return web.json_response({"error": {"message": "KV load failed", "code": 500}}, status=500)
        if params.get("do_remote_prefill") and "remote_bootstrap_addr" in params:
            await self._pull(params)
        await asyncio.sleep(self.faults.first_ms / 1000)
        if faulty and not body.get("stream"):
            await self._misbehave(request, 0)
        limit = body.get("max_completion_tokens") or body.get("max_tokens", None if chat else 16) or DEFAULT_CHAT_TOKENS
        answer = Answer(body, chat, prompt, limit, self.faults.ids)
        if body.get("stream"):
            return await self._stream(request, body, answer, faulty)
        whole = answer.whole()
        if params.get("do_remote_decode"):
            whole["choices"][0]["finish_reason"] = self.faults.prefill_finish
            if self.faults.returned_params:
                whole["kv_transfer_params"] = {"do_remote_prefill": True, "remote_engine_id": self.name}
            if "transfer_id" in params and self.faults.sends:
                self.transfers.setdefault(params["transfer_id"], asyncio.Event()).set()
        return web.json_response(whole)

    async def _pull(self, params: dict) -> None:
        url = f"{params['remote_bootstrap_addr']}/transfer/{params['transfer_id']}"
        try:
            async with aiohttp.ClientSession() as session, session.get(url) as response:
                assert (await response.json())["engine_id"] == params["remote_engine_id"]
        except aiohttp.ClientError:
            await asyncio.sleep(3600)  # nobody tells it that prefill is dead

    async def _stream(self, request: web.Request, body: dict, answer: "Answer", faulty: bool) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        for number, event in enumerate(answer.events()):
            if faulty and await self._misbehave(request, number, response):
                return response
            await self._write(response, b"data: " + json.dumps(event, ensure_ascii=False).encode() + b"\n\n")
            await asyncio.sleep(self.faults.gap_ms / 1000)
        if not (faulty and await self._misbehave(request, number + 1, response)):
            await self._write(response, b"data: [DONE]\n\n")
        return response

    async def _write(self, response: web.StreamResponse, data: bytes) -> None:
        step = self.faults.split or len(data)
        for start in range(0, len(data), step):
            await response.write(data[start : start + step])
            if self.faults.split:
                await asyncio.sleep(0)

    async def _misbehave(self, request: web.Request, number: int, response: web.StreamResponse | None = None) -> bool:
        """True if the stream is to end here."""
        faults = self.faults
        if number == faults.kill_after:
            os.kill(os.getpid(), signal.SIGKILL)
        if number == faults.drop_after:
            if response is not None:
                await response.write(b'data: {"id": "cut in the mid')
                await asyncio.sleep(0.01)
            request.transport.abort()
            return True
        if number == faults.hang_after:
            await asyncio.sleep(3600)
        if number == faults.error_after and response is not None:
            error = {"error": {"message": "engine core died", "type": "InternalServerError", "code": 500}}
            await response.write(b"data: " + json.dumps(error).encode() + b"\n\ndata: [DONE]\n\n")
            return True
        return number == faults.end_after


class Answer:
    """What the model says, in the form of one of the two routes."""

    def __init__(self, body: dict, chat: bool, prompt: list[int], limit: int, knows_ids: bool) -> None:
        self.body, self.chat, self.prompt, self.limit = body, chat, prompt, limit
        self.tells_ids = bool(body.get("return_token_ids")) and knows_ids
        self.stops = body.get("stop") or []
        self.stops = [self.stops] if isinstance(self.stops, str) else self.stops
        self.head = {
            "id": ("chatcmpl-" if chat else "cmpl-") + os.urandom(8).hex(),
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": int.from_bytes(os.urandom(3), "big"),
            "model": "stub",
        }

    def events(self):
        include_usage = (self.body.get("stream_options") or {}).get("include_usage")
        if self.chat:
            first = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            yield self._event(first, first=True)
        sent, text, made = 0, "", []
        hold = max((len(stop) - 1 for stop in self.stops), default=0)
        unsaid: list[int] = []
        while len(made) < self.limit:
            token = next_token(self.prompt + made)
            made.append(token)
            unsaid.append(token)
            finish = "length" if len(made) == self.limit else None
            if not is_held(token) or finish:
                text += text_of(unsaid)
                unsaid = []
            for stop in self.stops:
                if stop in text:
                    text, finish = text[: text.index(stop)], "stop"
            new = text[sent : len(text) if finish else max(sent, len(text) - hold)]
            sent += len(new)
            body = {"delta": {"content": new}} if self.chat else {"text": new}
            choice = {"index": 0, **body, "logprobs": None, "finish_reason": finish}
            if self.tells_ids:
                choice["token_ids"] = [token]
            yield self._event(choice, first=len(made) == 1 and not self.chat)
            if finish:
                break
        if include_usage:
            yield {**self.head, "choices": [], "usage": self._usage(len(made))}

    def whole(self) -> dict:
        made = generate(self.prompt, self.limit)
        text = text_of(made)
        body = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        choice = {"index": 0, **body, "finish_reason": "length"}
        return {**self.head, "choices": [choice], "usage": self._usage(len(made))}

    def _event(self, choice: dict, first: bool) -> dict:
        event = {**self.head, "choices": [choice]}
        if first and self.tells_ids:
            (event if self.chat else choice)["prompt_token_ids"] = self.prompt
        return event

    def _usage(self, made: int) -> dict:
        prompt = len(self.prompt)
        return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}


def main() -> None:
    port, host = int(sys.argv[1]), sys.argv[2]
    engine = Engine(port)
    application = web.Application(client_max_size=64 << 20)
    application.router.add_get("/health", engine.health)
    application.router.add_get("/v1/models", engine.models)
    application.router.add_post("/control", engine.control)
    application.router.add_post("/reset", engine.reset)
    application.router.add_get("/seen", engine.get_seen)
    application.router.add_get("/query", engine.query)
    application.router.add_post("/tokenize", engine.tokenize)
    application.router.add_get("/transfer/{id}", engine.transfer)
    application.router.add_post("/v1/completions", engine.complete)
    application.router.add_post("/v1/chat/completions", engine.complete)
    web.run_app(
        application,
        host=host,
        port=port,
        access_log=None,
        handler_cancellation=True,
        print=None,
        reuse_address=True,
        shutdown_timeout=0.1,
    )


if __name__ == "__main__":
    main()
