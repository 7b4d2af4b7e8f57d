"""The master on a port: decodes requests, asks the directory, encodes its answers; runs its clock; sends its kills.

One `Session` a connection, on any asyncio loop (uvloop is twice as fast).  A request that is quick is answered
where it was read, without a task; a long one goes in slices that leave the loop to others (see `handlers`).
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from mooncake.errors import ErrorCode, StoreError
from mooncake.master import (  # noqa: F401 -- they add handlers
    disk_requests,
    prefixes,
    requests,
    segment_requests,
    task_requests,
)
from mooncake.master.config import MasterConfig
from mooncake.master.counters import Counters
from mooncake.master.directory import Directory
from mooncake.master.handlers import HANDLERS, Handler, Reply, in_steps, must_wait_for, when_ended
from mooncake.master.limits import LONG_BODY, check_long
from mooncake.master.listening import listen
from mooncake.master.membership import Client
from mooncake.master.pool import Segment
from mooncake.master.refusals import failed, refusal
from mooncake.master.reign import Reign
from mooncake.master.roles import ROLES, handlers_of
from mooncake.master.tenants.credentials import open_credentials
from mooncake.master.tenants.names import scope_of, wrong_name
from mooncake.master.tenants.policy import Policy
from mooncake.master.tenants.scoping import scope_request
from mooncake.rpc import frame
from mooncake.rpc.handshake import MOST_BYTES, Guard
from mooncake.rpc.message import Message
from mooncake.rpc.messages import DECODERS, KINDS, PROTOCOL, SEGMENT, Exist, ExistReply, Hello, Welcome, encode
from mooncake.rpc.sockets import notice_lost_hosts
from mooncake.security.anteroom import LIMIT, Anteroom
from mooncake.security.secret import read_admin_key, read_secret
from mooncake.version import __version__

if TYPE_CHECKING:
    import socket

    from mooncake.master.kv_publisher import KvPublisher
    from mooncake.master.listening import Listening

log = logging.getLogger("mooncake.master")

BUSY_TICK_S = 0.01
IDLE_TICK_S = 0.1
_COLLECT_S = 10.0
_AWAKE_S = 60e-6
_PUSHED_ASIDE_S = 100e-6  # between two looks, which take 5 us when nobody else runs here
_CROWDED_S = 0.02
_STEP_S = 0.002
_HELLO = KINDS[Hello]
_EXIST = KINDS[Exist]
_MANY = 16  # keys in a question that is worth remembering


class MasterService:
    """A running master.  `port` is the one it listens on."""

    def __init__(self, config: MasterConfig, counters: Counters, reign: Reign | None = None) -> None:
        self.config = config
        self.counters = counters
        self.reign = reign  # None: it needs nobody's leave to serve
        self.directory = Directory(config, counters, term=0 if reign is None else reign.view.term)
        self.port = 0
        self.secret, self.admin_key = read_secret(), read_admin_key()
        self.anteroom = Anteroom()
        self.sessions: set[Session] = set()
        self._publisher: KvPublisher | None = None
        self.take_snapshot: Callable[[], Awaitable[str]] | None = None  # see snapshots.keeper
        self.credentials = open_credentials(config.tenant_credentials_file, self.secret)
        self.tenant_policy: Policy | None = None  # where changes of quotas are kept,
        self.changing_quotas = asyncio.Lock()  # in the order in which they are asked for
        self._server: Listening | None = None
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._working: asyncio.Handle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.taking_in = asyncio.Lock()  # one announcement at a time, so that all together leave room for others
        self._next_collection = 0.0
        self._awake = False
        self._awake_until = self._crowded_until = self._looked = 0.0
        self._collected_by_others = gc.isenabled()

    async def start(self, listening: socket.socket | None = None) -> None:
        """Serve, on a socket that listens already or else on the configured address."""
        if self.config.kv_events_endpoint:
            from mooncake.master.kv_publisher import publish_events

            self._publisher = publish_events(self.config, self.counters, self.directory.catalog)
        address = self.config.rpc_address, self.config.rpc_port
        self._server = await listen(listening or address, lambda: Session(self))
        self.port = self._server.sockets[0].getsockname()[1]
        gc.collect()
        gc.freeze()  # what is there now stays; a full collection then looks only at what came later,
        gc.disable()  # and is run by `_tick`, not in the middle of a request
        self._timer = self._loop.call_later(IDLE_TICK_S, self._tick)

    @property
    def publishes_events(self) -> bool:
        return self._publisher is not None

    async def close(self) -> None:
        """Stop listening and drop every connection; quick whatever the directory holds."""
        for handle in (self._timer, self._working):
            if handle is not None:
                handle.cancel()
        if self._server is not None:
            self._server.close()
        for session in list(self.sessions):
            session.abort()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._publisher is not None:
            self._publisher.close()
        if self._collected_by_others:
            gc.unfreeze()
            gc.enable()

    async def remove_all(self, force: bool, scope: str = "") -> int:
        """Remove every value of a scope (that is not leased), as a client's RemoveAll; how many."""
        removed = await in_steps(self.directory.remove_all(force, scope), self.flush)
        self.counters.one("remove_all", failed=0)
        return removed

    # -- time

    def _tick(self) -> None:
        directory = self.directory
        now = directory.clock()
        try:
            directory.tick(now)
            self.work()
        except Exception:
            log.exception("a periodic step failed")
        self._timer = self._loop.call_later(BUSY_TICK_S if directory.busy else IDLE_TICK_S, self._tick)
        if now >= self._next_collection:
            self._next_collection = now + _COLLECT_S
            gc.collect()
        else:
            gc.collect(0)  # takes the many new tuples of numbers off its lists, so that the full one stays short

    def work(self) -> None:
        """One step of everything that is to be done as soon as possible; comes back by itself if that was not all."""
        directory = self.directory
        now = directory.clock()
        more = directory.granting.serve(now)
        more |= directory.granting.evict_ahead(now)
        if directory.background:
            if next(directory.background[0], directory) is directory:
                directory.background.popleft()
            more |= bool(directory.background)
        self.flush()
        if more and self._working is None:
            self._working = self._loop.call_soon(self._work_on)

    def _work_on(self) -> None:
        self._working = None
        try:
            self.work()
        except Exception:
            log.exception("a background step failed")

    def hurry(self) -> None:
        """A put waits: tick soon."""
        soon = self._loop.time() + BUSY_TICK_S
        if self._timer is not None and self._timer.when() > soon:
            self._timer.cancel()
            self._timer = self._loop.call_at(soon, self._tick)

    def keep_awake(self) -> None:
        """Somebody has just asked something: he may ask again at once, and waking a process that sleeps takes longer
        than an answer.  So the loop goes on looking for a moment, giving way to whoever else wants to run."""
        now = time.monotonic()
        self._awake_until = now + _AWAKE_S
        if not self._awake and now >= self._crowded_until:
            self._awake = True
            self._looked = now
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        now = time.monotonic()
        if now - self._looked > _PUSHED_ASIDE_S:  # somebody else needs this processor more
            self._crowded_until = now + _CROWDED_S
        if now < self._awake_until and now >= self._crowded_until:
            os.sched_yield()
            self._looked = now
            self._loop.call_soon(self._look)
        else:
            self._awake = False

    def flush(self) -> None:
        """Send what the directory has for the segments' owners."""
        pool = self.directory.pool
        if pool.dirty:
            for segment, kill in pool.take_outbox():
                if segment.send is not None:
                    segment.send(kill)
        for segment, copy in self.directory.tasks.take_outbox():
            if segment.send is not None:
                segment.send(copy)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def drop_segment_sessions(self, but: Session) -> None:
        """The term has changed: every segment's server shall say Hello again."""
        for session in list(self.sessions):
            if session.segments and session is not but:
                session.abort()


class _LastExist(NamedTuple):
    """A question and its encoded answer, and how long that holds (Directory.answers_as)."""

    body: bytes
    reply: bytes
    keys: int
    version: int
    until: float


class Session(asyncio.Protocol):
    """One connection.  `segments`: those that its server mounted here."""

    def __init__(self, service: MasterService) -> None:
        self.service = service
        self.client: Client | None = None
        self.hello: Hello | None = None
        self.scope = ""  # what all keys that it names start with in the directory
        self.segments: dict[int, Segment] = {}
        self.send_one_way = self._send_one_way  # one object, to know it again
        self.in_turn = asyncio.Lock()  # for what must keep its order though it takes several steps
        self._handlers: Mapping[int, Handler] = HANDLERS
        self._guard = Guard(service.secret, self._vet)
        self._ticket = 0
        self._reader = frame.FrameReader(frame.MAX_BODY if self._guard.is_open else MOST_BYTES)
        self._unanswered: list[frame.Frame] = []
        self._last_exist: _LastExist | None = None
        self._overfull = False
        self._silent = True  # nothing has come yet
        self._transport: asyncio.Transport | None = None

    @property
    def connected(self) -> bool:
        return self._transport is not None

    # -- asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        notice_lost_hosts(transport.get_extra_info("socket"))
        self.service.sessions.add(self)
        if not self._guard.is_open:
            self._ticket = self.service.anteroom.enter(self.abort)
            asyncio.get_running_loop().call_later(LIMIT, self._give_up)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        service = self.service
        service.anteroom.leave(self._ticket)
        service.sessions.discard(self)
        directory = service.directory
        now = directory.clock()
        for segment in self.segments.values():
            if segment.send is self.send_one_way:
                directory.disconnect(segment, now)
        self.segments.clear()
        if self.client is not None:
            directory.clients.leave(self.client, now)

    def pause_writing(self) -> None:
        """The other side does not read its replies: take no more of its requests."""
        self._overfull = True
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._overfull = False
        if self._transport is not None and not self._unanswered:
            self._transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        if self._may_not_serve:
            return
        try:
            if self._silent:
                self._silent = False
                frame.check_first(data, _HELLO)
            frames = self._reader.feed(data)
        except frame.FramingError as error:
            self._warn(error)
            self.abort()
            return
        if self._unanswered:
            self._unanswered += frames
        else:
            self._answer_some(frames)

    def _answer_some(self, frames: Sequence[frame.Frame]) -> None:
        """Answer as many of `frames` as fit one step of the loop; the others in later steps, without reading on."""
        replies = []
        stop = 0.0
        for i, got in enumerate(frames):
            if i == 1:
                stop = time.monotonic() + _STEP_S
            elif i > 1 and time.monotonic() >= stop:
                self._postpone(frames[i:])
                break
            reply = self._answer(got)
            if reply is not None:
                replies.append(reply)
            if self._transport is None:
                return
        if replies and self._transport is not None:
            self.service.keep_awake()
            self._transport.write(replies[0] if len(replies) == 1 else b"".join(replies))
        if self.service.directory.pool.dirty:
            self.service.flush()

    def _postpone(self, frames: Sequence[frame.Frame]) -> None:
        self._unanswered = list(frames)
        if self._transport is not None:
            self._transport.pause_reading()
        asyncio.get_running_loop().call_soon(self._answer_more)

    def _answer_more(self) -> None:
        frames, self._unanswered = self._unanswered, []
        if self._transport is not None and not self._may_not_serve:
            self._answer_some(frames)
            if not self._unanswered and not self._overfull:
                self._transport.resume_reading()

    @property
    def _may_not_serve(self) -> bool:
        """Its time as the leader may be over, whatever time passed since this loop looked last; hangs up then."""
        reign = self.service.reign
        if reign is None or reign.holds():
            return False
        self.abort()
        return True

    def _warn(self, error: Exception) -> None:
        peer = self._transport.get_extra_info("peername") if self._transport is not None else None
        log.warning("the connection from %s is closed: %s", peer[0] if peer else "somebody", error)

    def _give_up(self) -> None:
        if self.client is None:
            self.abort()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # -- requests

    def _answer(self, got: frame.Frame) -> bytes | None:
        """The reply to send now, if any."""
        try:
            decoder = DECODERS.get(got.kind)
            if decoder is None:
                raise StoreError(ErrorCode.INVALID_PARAMS, f"unknown message kind {got.kind}")
            if got.kind == _EXIST and (again := self._asked_again(got)) is not None:
                return again
            if len(got.body) > LONG_BODY:
                check_long(got.body)
            message = decoder.decode(got.body)
            if self.client is None:
                return self._greet(got, message)
            handler = self._handlers.get(got.kind)
            if handler is None:
                raise StoreError(ErrorCode.INVALID_PARAMS, f"{type(message).__name__} is not for the master from here")
            if self.scope:
                scope_request(message, self.scope)
            met = self.service.directory.puts.eager and must_wait_for(self, got.kind, message)
            reply: Reply = when_ended(self, got.kind, message, list(met)) if met else handler(self, message)
        except Exception as error:
            if self.client is None and self._transport is not None:
                self._warn(error)
                self._transport.write(refusal(got, error) or b"")
                self._transport.close()
                return None
            return refusal(got, error)
        if reply is None:
            return None
        if isinstance(reply, ExistReply) and len(reply.found) >= _MANY:
            self.remember_exist(got.body, reply)
        if isinstance(reply, Message):
            return frame.pack(got.kind, frame.REPLY, got.request_id, encode(reply))
        self.service.spawn(self._answer_later(got, reply))
        return None

    def _asked_again(self, got: frame.Frame) -> bytes | None:
        """The reply to the very question that this session asked last, while it still holds: engines ask about a
        waiting request's keys again in every step."""
        last = self._last_exist
        if last is None or last.body != got.body:
            return None
        directory = self.service.directory
        if directory.puts.eager or not directory.answers_as(last.version, last.until):
            return None
        self.service.counters.request("exist_key", last.keys, 0)
        return frame.pack(_EXIST, frame.REPLY, got.request_id, last.reply)

    def remember_exist(self, body: bytes, reply: ExistReply) -> None:
        version, until = self.service.directory.mark()
        self._last_exist = _LastExist(body, encode(reply), len(reply.found), version, until)

    async def _answer_later(self, got: frame.Frame, work: Coroutine[Any, Any, Message | None]) -> None:
        try:
            reply = await work
            raw = None if reply is None else frame.pack(got.kind, frame.REPLY, got.request_id, encode(reply))
        except Exception as error:
            raw = refusal(got, error)
        if raw is not None and self._transport is not None and not self._may_not_serve:
            self._transport.write(raw)
        self.service.flush()

    def _greet(self, got: frame.Frame, message: Message) -> bytes | None:
        if isinstance(message, Hello) and not self._is_one_of_us(got, message):
            return None
        welcome = self._guard.answer(message, self._arrive)
        if welcome is None:
            self._close_after(got, ErrorCode.INVALID_PARAMS, "a connection starts with Hello")
            return None
        return frame.pack(got.kind, frame.REPLY, got.request_id, encode(welcome))

    def _is_one_of_us(self, got: frame.Frame, message: Hello) -> bool:
        self.hello = message
        if message.protocol != PROTOCOL:
            self._close_after(
                got,
                ErrorCode.INVALID_VERSION,
                f"this master (version {__version__}) speaks protocol {PROTOCOL}, this {message.role[:20]} "
                f"(version {message.version[:40]}) protocol {message.protocol}; install the same version on both sides",
            )
            return False
        if message.role not in ROLES or not message.client:
            self._close_after(got, ErrorCode.INVALID_PARAMS, f"unknown role {message.role[:40]!r} or no client id")
            return False
        wrong = wrong_name(message.tenant) if self.service.directory.tenants is not None else ""
        if wrong and message.role == "client":
            self._close_after(got, ErrorCode.INVALID_PARAMS, f"tenant_id {message.tenant[:200]!r}: {wrong}")
            return False
        return True

    def _vet(self, proof: bytes, client_nonce: bytes, nonce: bytes) -> None:
        """Raises StoreError unless it is of the tenant that it said."""
        credentials, hello = self.service.credentials, self.hello
        if credentials is not None and hello is not None and hello.role != SEGMENT:
            credentials.vet(hello.tenant, proof, client_nonce, nonce)

    def _arrive(self) -> Welcome:
        """It is one of us."""
        assert self.hello is not None
        directory, hello = self.service.directory, self.hello
        is_client, tenants = hello.role != SEGMENT, directory.tenants is not None
        if tenants and is_client:
            self.scope = scope_of(hello.tenant)
        self.client = directory.clients.arrive(hello.client, hello.host, self.scope if is_client else None)
        self._handlers = handlers_of(hello.role, tenants)
        self._reader.most = frame.MAX_BODY
        self.service.anteroom.leave(self._ticket)
        return Welcome(PROTOCOL, __version__, directory.term, self.service.config.lease_ms)

    def _close_after(self, got: frame.Frame, code: ErrorCode, text: str) -> None:
        if self._transport is not None:
            self._transport.write(failed(got, code, text))
            self._transport.close()

    def _send_one_way(self, message: Message) -> None:
        if self._transport is not None:
            self._transport.write(frame.pack(KINDS[type(message)], frame.ONE_WAY, 0, encode(message)))


async def serve(config: MasterConfig, counters: Counters) -> MasterService:
    """Start a master on the running loop.  Raises OSError if its address cannot be bound, ConfigError if that of its
    KV events cannot."""
    service = MasterService(config, counters)
    await service.start()
    return service
