"""One client's request, from its arrival to the last byte of its answer.

    run ─► prefill half (before, or beside) ─► decode half ─► relay its answer
     ▲                                            │ refused, lost, 5xx, prefill lost
     └───────── again elsewhere, or resumed ──────┘

Before the first byte of an answer any failure is tried again elsewhere.  After it, a greedy stream is resumed; any
other ends with an error event, never as if it were whole.
"""

import asyncio
import logging
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic

import aiohttp
import msgspec
from aiohttp import web
from multidict import CIMultiDict

from mooncake.proxy import events, handoff, resume
from mooncake.proxy.call import Call
from mooncake.proxy.config import ProxyConfig, ResumeBy
from mooncake.proxy.errors import (
    Answered,
    Broken,
    NoInstance,
    PrefillLost,
    Refused,
    Reported,
    UpstreamError,
    error_event,
    error_response,
)
from mooncake.proxy.handoff import Body
from mooncake.proxy.headers import to_client, to_engine
from mooncake.proxy.indexer import Indexer
from mooncake.proxy.instances import Fleet, Instance, Prompt, Role
from mooncake.proxy.metrics import Metrics
from mooncake.proxy.transcript import Transcript

logger = logging.getLogger(__name__)

_MOST_REFUSALS = 20  # refused connections on behalf of one request; each ejects an instance
_RANK = "X-data-parallel-rank"


class ClientGone(Exception):
    """The client closed its connection, or does not read what it is sent."""


@dataclass(slots=True)
class Services:
    """What all requests share."""

    config: ProxyConfig
    fleet: Fleet
    metrics: Metrics
    session: aiohttp.ClientSession
    indexer: Indexer | None
    background: set[asyncio.Task[bytes]] = field(default_factory=set)  # prefill halves that outlast their request


class Exchange:
    def __init__(self, services: Services, request: web.Request, request_id: str, raw: bytes, body: Body) -> None:
        self._services = services
        self._config, self._fleet, self._metrics = services.config, services.fleet, services.metrics
        self._limits = services.config.limits
        self._request = request
        self._raw, self._body = raw, body
        self._path = request.path
        self._prompt = Prompt()
        if self._config.policy == "prefix_affinity":
            self._prompt = Prompt(handoff.prompt_key(body, self._config.prefix_length))
        self.id = request_id
        self._headers = to_engine(request.headers, self.id)
        self._streams = bool(body.get("stream"))
        self._resumable = self._config.resume_by is not ResumeBy.NEVER and resume.is_resumable(body)
        self._asks_ids = self._resumable and self._config.resume_by is ResumeBy.TOKENS
        self._strips_ids = self._asks_ids and not body.get("return_token_ids")
        self._transcript = Transcript(whole=self._resumable)
        self._response: web.StreamResponse | None = None  # once the client has been told anything
        self._writing = False
        self._prefill_over = False  # the prefill half succeeded, or was given up
        self._params: Body | None = None  # what a finished prefill half says to decode
        self._avoid: dict[Role, set[Instance]] = {Role.PREFILL: set(), Role.DECODE: set()}
        self._prefill_task: asyncio.Task[bytes] | None = None
        self._relies_on: Instance | None = None  # the prefill instance that decode waits for
        self._tries = self._refusals = 0  # in a row without progress
        self._progress = 0  # tokens emitted when the last try failed
        self._arrived = monotonic()
        self._waited = 0.0  # seconds spent waiting for instances before the first event

    # ------------------------------------------------------------ the whole

    async def run(self) -> web.StreamResponse:
        """The answer, which may have been sent already.  Raises ClientGone."""
        if self._services.indexer is not None:
            self._prompt = Prompt(self._prompt.key, await self._services.indexer.matches(self._body))
        try:
            while True:
                try:
                    return await self._try()
                except UpstreamError as error:
                    ending = await self._after(error)
                    if ending is not None:
                        return ending
        except BaseException:
            if self._prefill_task is not None:
                self._prefill_task.cancel()
            raise

    async def _try(self) -> web.StreamResponse:
        """One way through the instances."""
        prefill = self._choose_prefill()
        while prefill is not None and not handoff.is_straight(prefill, self._config.connector):
            await self._prefill_first(prefill)
            prefill = self._choose_prefill()
        decode = await self._choose_decode()
        began = monotonic()
        try:
            answer = await self._decode(decode, prefill)
        except UpstreamError as error:
            self._waited += monotonic() - began
            if error.status >= 500 and not isinstance(error, PrefillLost):
                self._blame(Role.DECODE, decode, error)
            raise
        decode.served += 1
        return answer

    async def _decode(self, decode: Instance, prefill: Instance | None) -> web.StreamResponse:
        limit_s = self._limits.first_byte_s if self._streams else self._limits.response_s
        async with Call(decode, limit_s, self._can_move) as call:
            path, body = self._decode_half(call, prefill)
            async with self._services.session.post(decode.path(path), data=body, headers=self._headers) as upstream:
                if upstream.status >= 400:
                    raise Answered(upstream.status, to_client(upstream.headers, self.id), await upstream.read())
                if upstream.content_type == "text/event-stream":
                    return await self._relay(call, upstream)
                return await self._pass_whole(call, upstream)

    async def _after(self, error: UpstreamError) -> web.StreamResponse | None:
        """What to do about a failed try: None to try again, or the answer for the client."""
        stalled, self._writing = self._writing and error.status == 504, False
        if stalled:
            raise ClientGone
        self._transcript.settle()
        if self._prefill_task is not None:
            self._prefill_task.cancel()
            self._prefill_task = None
        if isinstance(error, Answered) and error.status < 500 and self._response is None:
            return error.response()
        if self._is_over():
            return await self._finish(resume.final_events(self._body, self._transcript))
        self._params = None  # of one use: decode may have fetched what they name
        relied_on, self._relies_on = self._relies_on, None
        if relied_on is not None and (isinstance(error, (PrefillLost, Answered, Reported)) or error.status == 504):
            self._avoid[Role.PREFILL].add(relied_on)  # it failed, or what it should have sent may not have come
        if isinstance(error, PrefillLost):
            return None
        if isinstance(error, Answered) and relied_on is None and self._response is None and not self._has_untried():
            return error.response()
        if self._transcript.count > self._progress:
            self._progress, self._tries, self._refusals = self._transcript.count, 0, 0
        self._tries += not isinstance(error, Refused)
        self._refusals += isinstance(error, Refused)
        hopeless = isinstance(error, NoInstance) or error.status < 500
        if hopeless or self._tries > self._limits.retries or self._refusals > _MOST_REFUSALS:
            return await self._give_up(error)
        if not self._can_go_on():
            return await self._give_up(error)
        if self._response is not None:
            self._metrics.resumptions.labels("resumed").inc()
            logger.info("request %s is resumed after %d tokens", self.id, self._transcript.count)
        return None

    def _is_over(self) -> bool:
        """Whether only the end of the stream is missing."""
        if self._response is None or not self._transcript.readable or not handoff.has_one_sequence(self._body):
            return False
        left = resume.remaining(self._body, self._transcript) if self._transcript.token_ids is not None else None
        return self._transcript.finish_reason is not None or (self._resumable and left is not None and left <= 0)

    async def _give_up(self, error: UpstreamError) -> web.StreamResponse:
        logger.warning("request %s is given up: %s", self.id, error.why)
        if self._response is not None:
            self._metrics.resumptions.labels("failed").inc()
            event = error.event if isinstance(error, Reported) else error_event(error.status, error.why)
            return await self._finish(event)
        if isinstance(error, Answered):
            return error.response()
        return error_response(error.status, f"No instance could answer: {error.why}.")

    # ------------------------------------------------------------ choosing instances

    def _choose_prefill(self) -> Instance | None:
        """None: straight to decode (no prefill is wanted any more, or none can be had)."""
        if self._prefill_over or self._response is not None or not self._fleet.of(Role.PREFILL):
            return None
        instance = self._fleet.choose(Role.PREFILL, self._prompt, self._avoid[Role.PREFILL])
        one_transfer = handoff.has_one_sequence(self._body)
        if instance is not None and handoff.is_straight(instance, self._config.connector) and not one_transfer:
            instance = None
        failed = self._avoid[Role.PREFILL]
        if instance is None or instance in failed or len(failed) > self._limits.retries:
            self._prefill_over = True
            self._metrics.prefills.labels("skipped").inc()
            return None
        return instance

    async def _choose_decode(self) -> Instance:
        began = monotonic()
        avoid = self._avoid[Role.DECODE]
        instance = await self._fleet.wait_and_choose(Role.DECODE, self._prompt, avoid, self._limits.wait_s)
        self._waited += monotonic() - began
        if instance is None:
            raise NoInstance(f"no decode instance became available within {self._limits.wait_s:g} s", 503)
        return instance

    def _can_move(self) -> bool:
        """Whether a decode half whose instance is out of reach has somewhere to go."""
        self._transcript.read()
        return self._has_untried() and self._can_go_on()

    def _has_untried(self) -> bool:
        return any(other not in self._avoid[Role.DECODE] for other in self._fleet.ready(Role.DECODE))

    def _can_go_on(self) -> bool:
        """Whether another instance can take over where this answer is now."""
        if self._response is None:
            return True
        if not self._transcript.text:
            return self._transcript.readable
        return self._resumable and resume.can_resume(self._body, self._transcript, self._config.resume_by)

    def _blame(self, role: Role, instance: Instance, error: UpstreamError) -> None:
        """Note that a request failed there."""
        logger.info("request %s failed at %s instance %s: %s", self.id, role, instance.url, error.why)
        self._avoid[role].add(instance)
        self._metrics.retries.labels(role, type(error).__name__.lower()).inc()
        self._fleet.suspect(instance, error.why)
        if isinstance(error, Refused):
            self._fleet.eject(instance, error.why)

    # ------------------------------------------------------------ the halves

    async def _prefill_first(self, prefill: Instance) -> None:
        """The prefill half, to its end.  Raises Answered if the request itself is refused."""
        body = handoff.prefill_body(self._body, handoff.pool_params())
        began = monotonic()
        try:
            answer = await self._ask_prefill(prefill, body, self._headers)
        except Answered as error:
            if error.status < 500:
                raise
            return
        except UpstreamError:
            return  # blamed: another one is tried, or decode does it all
        finally:
            self._waited += monotonic() - began
        self._params = handoff.returned_params(answer)
        self._prefill_over = True
        self._metrics.prefills.labels("without_params" if self._params is None else "with_params").inc()

    async def _ask_prefill(self, prefill: Instance, body: Body, headers: CIMultiDict[str]) -> bytes:
        try:
            async with (
                Call(prefill, self._limits.prefill_s, lambda: True),
                self._services.session.post(
                    prefill.path(self._path), data=msgspec.json.encode(body), headers=headers
                ) as upstream,
            ):
                answer = await upstream.read()
                if upstream.status >= 400:
                    raise Answered(upstream.status, to_client(upstream.headers, self.id), answer)
        except UpstreamError as error:
            if error.status >= 500:
                self._blame(Role.PREFILL, prefill, error)
                self._metrics.prefills.labels("failed").inc()
            raise
        prefill.served += 1
        return answer

    def _decode_half(self, call: Call, prefill: Instance | None) -> tuple[str, bytes]:
        """Path and body for decode; a straight prefill half is sent on its way."""
        path, body = self._path, self._body
        if self._response is not None:
            path, body = resume.resumption(self._body, self._transcript, self._config.resume_by)
        params = self._params
        if prefill is not None:
            params = self._start_straight_prefill(call, prefill)
        if not self._asks_ids and params is None and body is self._body:
            return path, self._raw
        body = dict(body)
        if self._asks_ids:
            body["return_token_ids"] = True
        if params is not None:
            body["kv_transfer_params"] = params
        return path, msgspec.json.encode(body)

    def _start_straight_prefill(self, call: Call, prefill: Instance) -> Body:
        """Send the prefill half; `call` ends if it fails.  The parameters for decode."""
        rank, engine = prefill.next_engine()
        transfer = f"xfer-{self.id}-{uuid.uuid4().hex[:8]}"
        headers = self._headers.copy()
        headers[_RANK] = str(rank)
        body = handoff.prefill_body(self._body, handoff.straight_params(transfer))
        task = asyncio.create_task(self._ask_prefill(prefill, body, headers))
        self._services.background.add(task)
        call.rely_on(prefill)
        self._relies_on = prefill
        task.add_done_callback(self._straight_prefill_done(call))
        self._prefill_task = task
        return handoff.straight_decode_params(transfer, prefill.bootstrap, engine)

    def _straight_prefill_done(self, call: Call) -> Callable[[asyncio.Task[bytes]], None]:
        def done(task: asyncio.Task[bytes]) -> None:
            self._services.background.discard(task)
            if task.cancelled():
                return
            error = task.exception()
            if error is None:
                self._metrics.prefills.labels("straight").inc()
                if self._response is None and not handoff.hands_over(task.result()):
                    call.give_up(PrefillLost("prefill ended before it could send"))
            elif self._response is None and isinstance(error, UpstreamError):
                refused_itself = isinstance(error, Answered) and error.status < 500
                call.give_up(error if refused_itself else PrefillLost(f"prefill failed: {error}"))

        return done

    # ------------------------------------------------------------ the answer

    async def _pass_whole(self, call: Call, upstream: aiohttp.ClientResponse) -> web.StreamResponse:
        body = await upstream.read()
        self._first_byte(call)
        return web.Response(status=upstream.status, headers=to_client(upstream.headers, self.id), body=body)

    async def _relay(self, call: Call, upstream: aiohttp.ClientResponse) -> web.StreamResponse:
        """Pass events on as they come."""
        rewrite = self._rewriter()
        cutter, transcript = events.Cutter(), self._transcript
        read, chunk_s = upstream.content.readany, self._limits.chunk_s
        block = b""
        while arrived := await read():
            call.progress(chunk_s)
            whole = cutter.cut(arrived)
            if not whole:
                continue
            block = whole
            failure = None
            if events.FAILED in block:
                block, failure = events.split_failure(block)
            if block:
                transcript.add(block)
                if self._response is None:
                    await self._begin(call, upstream)
                await self._write(block if rewrite is None else rewrite(block))
            if failure is not None:
                raise Reported(failure)
        if not events.is_done(block):
            raise Broken("the instance ended the stream before its end")
        return await self._finish(b"")

    def _rewriter(self) -> Callable[[bytes], bytes] | None:
        if self._response is not None:
            return resume.Rewriter(self._body, self._transcript).rewrite
        return events.without_token_ids if self._strips_ids else None

    async def _begin(self, call: Call, upstream: aiohttp.ClientResponse) -> None:
        """The client gets the head of its answer."""
        call.no_longer_relies()
        self._relies_on = None
        self._response = web.StreamResponse(status=upstream.status, headers=to_client(upstream.headers, self.id))
        self._first_byte(call)
        await self._response.prepare(self._request)

    def _first_byte(self, call: Call) -> None:
        now = monotonic()
        self._metrics.observe_first(self._path, now - self._arrived, call.started - self._arrived - self._waited)

    async def _write(self, block: bytes) -> None:
        if self._response is None or not block:
            return
        self._writing = True
        try:
            await self._response.write(block)
        except ConnectionError:
            raise ClientGone from None
        self._writing = False

    async def _finish(self, last: bytes) -> web.StreamResponse:
        assert self._response is not None
        await self._write(last)
        try:
            await self._response.write_eof()
        except ConnectionError:
            raise ClientGone from None
        return self._response
