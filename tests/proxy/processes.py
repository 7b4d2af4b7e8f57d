"""Stub engines and the real proxy as processes, and a client that notes everything about an answer."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field

import aiohttp
from multidict import CIMultiDict

from tests.processes import BIN, free_port, wait_until
from tests.proxy.stub_engine import chat_text, generate, ids_of, text_of

ADMIN_KEY = "test-key"
PROMPT = "Once upon a time"


def http(url: str, body=None, headers=None, raw: bytes | None = None):
    """(status, headers, parsed JSON or text) of one request."""
    data = raw if raw is not None else None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", **(headers or {})} if data is not None else headers or {}
    request = urllib.request.Request(url, data=data, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            status, head, text = response.status, response.headers, response.read().decode()
    except urllib.error.HTTPError as error:
        status, head, text = error.code, error.headers, error.read().decode()
    try:
        return status, head, json.loads(text)
    except ValueError:
        return status, head, text


class _Process:
    def __init__(self, host: str = "127.0.0.1", prefix: Sequence[str] = ()) -> None:
        """`prefix`: what comes before its command, as on another host."""
        self.host, self.port, self._prefix = host, free_port(), list(prefix)
        self.url = f"http://{host}:{self.port}"
        self.process: subprocess.Popen | None = None

    def _launch(self, command: list[str], what: str, environment: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen([*self._prefix, *command], env=environment)
        try:
            wait_until(lambda: self._answers("/health"), 20, what)
        except BaseException:
            self.stop()
            raise

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def _answers(self, path: str) -> bool:
        assert self.process.poll() is None, f"it ended with {self.process.returncode}"
        try:
            return http(self.url + path)[0] in (200, 503)
        except OSError:
            return False


class Engine(_Process):
    def __init__(self, host: str = "127.0.0.1", prefix: Sequence[str] = ()) -> None:
        super().__init__(host, prefix)
        self.start()

    @property
    def bootstrap_port(self) -> int:
        return self.port

    def start(self) -> None:
        """Also again, after it was killed: on the same port, with a new engine id."""
        self._launch([sys.executable, "-m", "tests.proxy.stub_engine", str(self.port), self.host], "the stub engine")

    def is_unharmed(self) -> bool:
        """Whether another test may have it: alive, idle, and without faults from now on."""
        if self.process.poll() is not None:
            return False
        self.signal(signal.SIGCONT)
        return http(self.url + "/reset", {})[2] == {"active": 0}

    def control(self, **faults) -> None:
        assert http(self.url + "/control", faults)[0] == 200

    def seen(self) -> dict:
        return http(self.url + "/seen")[2]

    def bodies(self) -> list[dict]:
        return [request["body"] for request in self.seen()["requests"]]


class Proxy(_Process):
    def __init__(self, *flags, prefill=(), decode=(), key: str | None = ADMIN_KEY, ready: bool = True,
                 host: str = "127.0.0.1", prefix: Sequence[str] = ()) -> None:  # fmt: skip
        """`prefill`: engines, or pairs (engine, True) whose bootstrap server is to be used."""
        super().__init__(host, prefix)
        argv = [str(BIN / "mooncake_proxy"), f"--port={self.port}", f"--host={host}"]
        for one in prefill:
            engine, straight = one if isinstance(one, tuple) else (one, False)
            argv += ["--prefill", engine.url, str(engine.bootstrap_port) if straight else "none"]
        for engine in decode:
            argv += ["--decode", engine.url]
        environment = {name: value for name, value in os.environ.items() if name != "ADMIN_API_KEY"}
        if key is not None:
            environment["ADMIN_API_KEY"] = key
        self._before: dict[str, float] = {}
        self._command, self._environment = [*argv, *flags], environment
        self.start()
        if ready:
            wait_until(self.is_ready, what="all instances")

    def start(self) -> None:
        """Also again, after it has ended: on the same port."""
        self._launch(self._command, "the proxy", self._environment)

    def adopt(self, prefill, decode) -> None:
        """Serve these; metrics count from now on."""
        for one in prefill:
            engine, straight = one if isinstance(one, tuple) else (one, False)
            more = {"bootstrap_port": engine.bootstrap_port} if straight else {}
            assert self.change("add", "prefill", engine, **more)[0] == 200
        for engine in decode:
            assert self.change("add", "decode", engine)[0] == 200
        wait_until(self.is_ready, what="all instances")
        self._before = self._series()

    def leave(self) -> None:
        """Remove all instances."""
        for one in self.instances():
            body = {"role": one["role"], "url": one["url"]}
            assert http(self.url + "/instances/remove", body, {"X-API-Key": ADMIN_KEY})[0] == 200
        wait_until(lambda: not self.instances(), what="an empty proxy")

    def is_ready(self) -> bool:
        return all(one["state"] == "ready" for one in self.instances())

    def instances(self) -> list[dict]:
        status = http(self.url + "/status")[2]
        return status["prefill"] + status["decode"]

    def instance(self, engine: Engine) -> dict:
        return next(one for one in self.instances() if one["url"] == engine.url)

    def change(self, what: str, role: str, engine: Engine, key: str = ADMIN_KEY, **more):
        body = {"role": role, "url": engine.url, **more}
        return http(f"{self.url}/instances/{what}", body, {"X-API-Key": key})

    def metric(self, name: str, **labels: str) -> float:
        """Sum of the series that have these labels, since `adopt`."""
        return sum(
            value - self._before.get(series, 0)
            for series, value in self._series().items()
            if series.partition("{")[0] == name and all(f'{key}="{text}"' in series for key, text in labels.items())
        )

    def _series(self) -> dict[str, float]:
        lines = [line.rpartition(" ") for line in http(self.url + "/metrics")[2].splitlines() if line[0] != "#"]
        counted = [(series, float(value)) for series, _, value in lines if not series.endswith("_created")]
        return {series: value for series, value in counted if "instance_ready" not in series}

    def ask(self, body: dict, path: str = "/v1/completions", **headers: str):
        return http(self.url + path, body, headers)


@dataclass
class Streamed:
    """One streamed answer as the client saw it."""

    status: int = 0
    headers: CIMultiDict = field(default_factory=CIMultiDict)
    events: list[dict] = field(default_factory=list)
    raw: bytes = b""
    cut: bool = False  # the connection was lost

    @property
    def choices(self) -> list[dict]:
        return [choice for event in self.events for choice in event.get("choices", ())]

    @property
    def text(self) -> str:
        return "".join(one.get("text") or one.get("delta", {}).get("content") or "" for one in self.choices)

    @property
    def finish(self) -> list[str]:
        return [one["finish_reason"] for one in self.choices if one["finish_reason"]]

    @property
    def usage(self) -> dict:
        return next(event["usage"] for event in self.events if event.get("usage"))

    @property
    def error(self) -> dict | None:
        return next((event["error"] for event in self.events if "error" in event), None)

    @property
    def done(self) -> bool:
        return self.raw.endswith(b"data: [DONE]\n\n")

    @property
    def ids(self) -> set[str]:
        return {event["id"] for event in self.events if "id" in event}


async def stream(
    url: str,
    body: dict,
    session: aiohttp.ClientSession | None = None,
    stop_after: int = -1,
    live: list[Streamed] | None = None,
) -> Streamed:
    """`stop_after`: events after which the client goes away.  `live` gets the answer at once, whose `raw` grows."""
    answer = Streamed()
    if live is not None:
        live.append(answer)
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    own = session or aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
    try:
        async with own.post(url + path, json={**body, "stream": True}) as response:
            answer.status, answer.headers = response.status, CIMultiDict(response.headers)
            async for block in response.content.iter_any():
                answer.raw += block
                if 0 <= stop_after <= answer.raw.count(b"\n\n"):
                    return answer
    except aiohttp.ClientError:
        answer.cut = True
    finally:
        if session is None:
            await own.close()
    for line in answer.raw.decode().split("\n\n"):
        if line.startswith("data: {"):
            answer.events.append(json.loads(line[6:]))
    return answer


def streamed(url: str, body: dict, **options) -> Streamed:
    return asyncio.run(stream(url, body, **options))


def greedy(count: int = 20, prompt: str = PROMPT, **more) -> dict:
    return {"model": "stub", "prompt": prompt, "max_tokens": count, "temperature": 0, **more}


def greedy_chat(count: int = 20, content: str = PROMPT, **more) -> dict:
    messages = [{"role": "user", "content": content}]
    return {"model": "stub", "messages": messages, "max_tokens": count, "temperature": 0, **more}


def expected(body: dict) -> str:
    prompt = chat_text(body) if "messages" in body else body["prompt"]
    return text_of(generate(ids_of(prompt), body["max_tokens"]))


def assert_whole(answer: Streamed, body: dict) -> None:
    """One seamless stream with exactly what one undisturbed engine says."""
    assert answer.status == 200
    assert not answer.cut
    assert answer.error is None
    assert answer.text == expected(body)
    assert answer.done
    assert answer.raw.count(b"[DONE]") == 1
    assert answer.finish == ["length"]
    assert len(answer.ids) == 1
    assert len({(event["created"], event["object"]) for event in answer.events}) == 1
    assert sum("role" in choice.get("delta", {}) for choice in answer.choices) == ("messages" in body)
    if not body.get("return_token_ids"):
        assert b"token_ids" not in answer.raw
