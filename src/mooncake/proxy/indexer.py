"""Asks the indexer (`mooncake_conductor`) how much of a prompt each instance has.

It knows prompts by their tokens, so a text is first turned into tokens by an instance (`POST /tokenize`).  Both
together may take `indexer_s`; who is late or fails is not asked for a second, and the policy decides without.  An
instance is registered in the indexer with its URL, or host:port of that, as `instance_id`.
"""

import asyncio
import logging
import ssl
from collections.abc import Mapping
from time import monotonic

import aiohttp
import msgspec
from yarl import URL

from mooncake.proxy.config import ProxyConfig
from mooncake.proxy.handoff import Body
from mooncake.proxy.instances import Fleet, Role
from mooncake.proxy.metrics import Metrics
from mooncake.security.https import aiohttp_tls

logger = logging.getLogger(__name__)

_PAUSE_S = 1.0
_CHAT_FIELDS = (
    "messages", "add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs", "tools",
)  # fmt: skip
_HEADERS = {"Content-Type": "application/json"}
NOTHING: Mapping[str, int] = {}


class _Unfit(Exception):
    """The request itself is refused: the engines will say why."""


class _Tokens(msgspec.Struct):
    tokens: list[int]


class _Match(msgspec.Struct):
    longest_matched: int


class Indexer:
    def __init__(self, config: ProxyConfig, fleet: Fleet, metrics: Metrics, session: aiohttp.ClientSession) -> None:
        self._fleet, self._session = fleet, session
        self._url = URL(config.indexer.rstrip("/") + "/query")
        self._limit_s = config.indexer_s
        self._headers = {**_HEADERS, **config.indexer_headers}
        self._results = metrics.matches
        self._not_before = 0.0

    async def matches(self, body: Body) -> Mapping[str, int]:
        """Tokens of the prompt that instances have, by their URLs; nothing where that is not known in time."""
        found: Mapping[str, int] | None = None
        result = "skipped"
        if monotonic() >= self._not_before:
            try:
                async with asyncio.timeout(self._limit_s):
                    found = await self._find(body)
            except _Unfit:
                pass
            except TimeoutError:
                result = "late"
            except (aiohttp.ClientError, OSError, msgspec.MsgspecError, ValueError) as error:
                result = "failed"
                logger.warning("the indexer is not asked for %g s: %s", _PAUSE_S, error)
            if result != "skipped":
                self._not_before = monotonic() + _PAUSE_S
        if found is not None:
            result = "matched" if any(found.values()) else "unmatched"
        self._results.labels(result).inc()
        return found or NOTHING

    async def _find(self, body: Body) -> Mapping[str, int] | None:
        tokens = await self._tokens(body)
        if not tokens:
            return None
        asked = {"model": body.get("model") or "", "token_ids": tokens}
        if isinstance(body.get("cache_salt"), str):
            asked["cache_salt"] = body["cache_salt"]
        found = await self._post(self._url, asked, self._headers, aiohttp_tls())
        answer = msgspec.json.decode(found, type=dict[str, dict[str, _Match]])
        known = {name: match.longest_matched for tenant in answer.values() for name, match in tenant.items()}
        return {
            one.url: known[name] for one in self._fleet for name in (one.url, URL(one.url).authority) if name in known
        }

    async def _tokens(self, body: Body) -> list[int] | None:
        """The prompt as tokens; None if it is not one text."""
        prompt = body.get("prompt")
        if isinstance(prompt, list) and all(isinstance(token, int) for token in prompt):
            return prompt
        asked: Body = {"model": body.get("model")}
        if isinstance(prompt, str):
            asked["prompt"] = prompt
        elif isinstance(body.get("messages"), list):
            asked |= {name: body[name] for name in _CHAT_FIELDS if name in body}
        else:
            return None
        one = self._fleet.least_loaded(Role.PREFILL) or self._fleet.least_loaded(Role.DECODE)
        if one is None:
            return None
        return msgspec.json.decode(await self._post(one.path("/tokenize"), asked), type=_Tokens).tokens

    async def _post(
        self, url: URL, body: Body, headers: Mapping[str, str] = _HEADERS, tls: ssl.SSLContext | bool = True
    ) -> bytes:
        async with self._session.post(url, data=msgspec.json.encode(body), headers=headers, ssl=tls) as response:
            answer = await response.read()
            if 400 <= response.status < 500 and response.status != 401:
                raise _Unfit
            if response.status != 200:
                raise ValueError(f"{url} answered {response.status}: {answer[:200].decode(errors='replace')}")
            return answer
