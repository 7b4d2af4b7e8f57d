"""Greedy questions for the tiny model, and their answers' tokens."""

import asyncio
import random

import aiohttp

from tests.e2e.servers import BLOCK
from tests.proxy.processes import Streamed, stream

TOKENS = 32


def prompt(seed: int, tokens: int = 20 * BLOCK + 5) -> list[int]:
    random_ids = random.Random(seed)
    return [random_ids.randrange(2, 1024) for _ in range(tokens)]


def completion(ids: list[int], tokens: int = TOKENS, **more) -> dict:
    greedy = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return {"model": "tiny", "prompt": ids, "max_tokens": tokens, **greedy, **more}


def chat(ids: list[int], tokens: int = TOKENS, **more) -> dict:
    content = " ".join(f"w{number}" for number in ids)
    body = completion([], tokens, messages=[{"role": "user", "content": content}], **more)
    del body["prompt"]
    return body


def ids_of(answer: Streamed) -> list[int]:
    """The tokens of a stream without any fault."""
    assert answer.status == 200
    assert answer.error is None
    assert answer.done
    return [token for choice in answer.choices for token in choice.get("token_ids") or ()]


async def all_of(
    url: str, bodies: list[dict], at_once: int = 1000, live: list[Streamed] | None = None
) -> list[Streamed]:
    """Ask all of them, `at_once` at a time.  `live` gets those that were asked."""
    gate = asyncio.Semaphore(at_once)

    async def one(body: dict) -> Streamed:
        async with gate:
            return await stream(url, body, session, live=live)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        return await asyncio.gather(*map(one, bodies))
