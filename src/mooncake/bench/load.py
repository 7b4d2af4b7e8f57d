"""An open-loop load generator: every request is sent at its time, however many are still unanswered.

Times count from the moment a request was due, so that a generator that falls behind makes its figures worse and not
better; how far it fell behind is reported as well.  Blocks of an answer are only stamped as they arrive, and read when
the answer is over.
"""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import aiohttp

from mooncake.bench.workload import Planned

_WATCH = 0.5  # seconds between two looks at what `watch` watches


@dataclass
class Answered:
    """One request's answer; seconds.  `error` is empty when it is whole."""

    due: float  # after the start of the run
    sent: float  # after it was due
    input_tokens: int
    output_tokens: int = 0
    ttft: float = 0.0
    e2el: float = 0.0
    gaps: list[float] = field(default_factory=list)  # between two events with tokens
    error: str = ""

    @property
    def tpot(self) -> float | None:
        """Seconds a token after the first."""
        return (self.e2el - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None


@dataclass(frozen=True)
class Target:
    url: str  # of an OpenAI-style server, without /v1
    model: str
    timeout: float  # seconds for a whole answer


async def generate(target: Target, planned: Sequence[Planned], watch: Callable[[], object]) -> list[Answered]:
    """Send all at their times and wait for all answers, in the order of `planned`.

    `watch` is called twice a second; what it raises ends the run and is raised here.
    """
    bodies = [_body(target, one) for one in planned]
    async with _session() as session:
        start = time.perf_counter()
        tasks = [
            asyncio.create_task(_at_its_time(session, target, one, body, start))
            for one, body in zip(planned, bodies, strict=True)
        ]
        try:
            pending: set[asyncio.Task[Answered]] = set(tasks)
            while pending:
                done, pending = await asyncio.wait(pending, timeout=_WATCH)
                for task in done:
                    task.result()  # a signal may have been raised in any of them
                watch()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return [task.result() for task in tasks]


async def one_by_one(target: Target, planned: Sequence[Planned], watch: Callable[[], object]) -> list[Answered]:
    """The same, each after the answer to the one before; when they are due does not matter."""
    answers = []
    for one in planned:
        answers += await generate(target, [one], watch)
    return answers


async def models_of(url: str, timeout: float = 10.0) -> list[str]:
    """Names of the models that a server has.  Raises aiohttp.ClientError, TimeoutError or ValueError."""
    async with _session() as session, session.get(f"{url}/v1/models", timeout=_within(timeout)) as response:
        response.raise_for_status()
        found = json.loads(await response.text())
        try:
            return [str(model["id"]) for model in found["data"]]
        except (KeyError, TypeError):
            raise ValueError("its /v1/models is not a list of models") from None


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), auto_decompress=False)


def _within(seconds: float) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=seconds)


def _body(target: Target, planned: Planned) -> bytes:
    request = {
        "model": target.model,
        "prompt": planned.prompt,
        "max_tokens": planned.output_len,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return json.dumps(request).encode()


async def _at_its_time(
    session: aiohttp.ClientSession, target: Target, planned: Planned, body: bytes, start: float
) -> Answered:
    due = start + planned.at
    if (early := due - time.perf_counter()) > 0:
        await asyncio.sleep(early)
    answered = Answered(planned.at, time.perf_counter() - due, len(planned.prompt))
    blocks: list[tuple[float, bytes]] = []
    try:
        async with session.post(
            f"{target.url}/v1/completions",
            data=body,
            headers={"Content-Type": "application/json"},
            timeout=_within(target.timeout),
        ) as response:
            async for block in response.content.iter_any():
                blocks.append((time.perf_counter() - due, block))
            if response.status != 200:
                text = b"".join(block for _, block in blocks).decode(errors="replace")
                answered.error = f"status {response.status}: {_message(text)}"
                return answered
    except TimeoutError:
        answered.error = f"no whole answer within {target.timeout:g} s"
        return answered
    except aiohttp.ClientError as error:
        answered.error = f"the connection failed: {str(error) or type(error).__name__}"
        return answered
    _read(answered, blocks)
    return answered


def _read(answered: Answered, blocks: list[tuple[float, bytes]]) -> None:
    """Take the events of a streamed answer out of its blocks."""
    events, rest = list[tuple[float, bytes]](), b""
    for at, block in blocks:
        *whole, rest = (rest + block).replace(b"\r\n", b"\n").split(b"\n\n")
        events += [(at, event.removeprefix(b"data: ")) for event in whole if event.startswith(b"data: ")]
    times, counted, told, done = list[float](), 0, -1, False
    for at, data in events:
        if data == b"[DONE]":
            done = True
            continue
        try:
            event = json.loads(data)
        except ValueError:
            answered.error = f"an event is not JSON: {data[:100]!r}"
            return
        if "error" in event:
            answered.error = f"the stream ended with an error: {_message(json.dumps(event))}"
            return
        if usage := event.get("usage"):
            told = int(usage["completion_tokens"])
        if any("text" in choice for choice in event.get("choices", ())):
            times.append(at)
            counted += 1
    if not done or not times:
        answered.error = "the stream ended before its end was said" if times else "the stream had no token"
        return
    answered.output_tokens = told if told >= 0 else counted
    answered.ttft, answered.e2el = times[0], times[-1]
    answered.gaps = [after - before for before, after in pairwise(times)]


def _message(text: str) -> str:
    """What a JSON error says, else the text itself, cut short."""
    try:
        found = json.loads(text)
        error = found.get("error", found)
        text = str(error.get("message", error)) if isinstance(error, dict) else str(error)
    except (ValueError, AttributeError):
        pass
    return text[:200]
