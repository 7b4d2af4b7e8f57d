"""One connection to a master, for tests: real sockets, real frames; a fake segment owner that confirms kills."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from mooncake.master.config import MasterConfig
from mooncake.master.counters import Counters
from mooncake.master.service import MasterService, serve
from mooncake.rpc import frame
from mooncake.rpc.message import Message
from mooncake.rpc.messages import (
    DECODERS,
    KINDS,
    PROTOCOL,
    REPLY_OF,
    Announce,
    Failure,
    Grant,
    Hello,
    Kill,
    Killed,
    Mount,
    PutEnd,
    PutOptions,
    PutStart,
    Record,
    SegmentInfo,
    Welcome,
    encode,
)


@asynccontextmanager
async def master(**settings: Any) -> AsyncIterator[MasterService]:
    service = await serve(MasterConfig(rpc_address="127.0.0.1", rpc_port=0, **settings), Counters())
    try:
        yield service
    finally:
        await service.close()
        _open.clear()


_open: list[Wire] = []  # a connection whose task nobody holds would be collected


class Wire:
    """Requests with replies; `call` returns a Failure as it is."""

    def __init__(self) -> None:
        self._reader_task: asyncio.Task[None] | None = None
        self._waiting: dict[int, tuple[type[Message], asyncio.Future[Message]]] = {}
        self._count = 0
        self.closed = asyncio.Event()

    async def connect(self, port: int) -> None:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", port)
        self._reader_task = asyncio.create_task(self._read())
        _open.append(self)

    async def hello(self, role: str, client: str, host: str = "h1") -> Welcome:
        welcome = await self.call(Hello(PROTOCOL, "test", role, client, host))
        assert isinstance(welcome, Welcome)
        return welcome

    async def _read(self) -> None:
        frames = frame.FrameReader()
        try:
            while data := await self.reader.read(1 << 16):
                for got in frames.feed(data):
                    body = DECODERS[KINDS[Failure] if got.flags & frame.FAILED else self._kind(got)].decode(got.body)
                    if got.flags & frame.ONE_WAY:
                        self.told(body)
                    else:
                        self._waiting.pop(got.request_id)[1].set_result(body)
        except ConnectionError:
            pass
        self.closed.set()
        for _, future in self._waiting.values():
            if not future.done():
                future.set_exception(ConnectionError("closed"))

    def _kind(self, got: frame.Frame) -> int:
        return got.kind if got.flags & frame.ONE_WAY else KINDS[REPLY_OF[self._waiting[got.request_id][0]]]

    def told(self, message: Message) -> None:
        raise AssertionError(message)

    def send(self, message: Message) -> asyncio.Future[Message]:
        self._count += 1
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._waiting[self._count] = (type(message), future)
        self.writer.write(frame.pack(KINDS[type(message)], frame.REQUEST, self._count, encode(message)))
        return future

    async def call(self, message: Message) -> Any:
        return await self.send(message)

    def tell(self, message: Message) -> None:
        self.writer.write(frame.pack(KINDS[type(message)], frame.ONE_WAY, 0, encode(message)))

    def abort(self) -> None:
        self.writer.transport.abort()

    async def put(self, keys: list[str], size: int, options: PutOptions | None = None) -> list[int]:
        """All of a put but the bytes; a code a key."""
        started = await self.call(PutStart(keys, [size] * len(keys), options))
        seqs = [grant.seq for grant in started.grants if isinstance(grant, Grant)]
        ended = iter((await self.call(PutEnd(seqs))).codes if seqs else [])
        return [next(ended) if isinstance(grant, Grant) else grant for grant in started.grants]


class Owner(Wire):
    """A segment server without bytes; confirms a kill `delay` seconds after it came, unless `delay` is None."""

    def __init__(self) -> None:
        super().__init__()
        self.kills: list[tuple[int, int, int, int]] = []  # segment, slot, seq, hide
        self.delay: float | None = 0.0

    def told(self, message: Message) -> None:
        assert isinstance(message, Kill)
        self.kills += [
            (message.segment, slot, seq, hide)
            for slot, seq, hide in zip(message.slots, message.seqs, message.hide, strict=True)
        ]
        if self.delay is not None:
            asyncio.get_running_loop().call_later(self.delay, self.confirm, message)

    def confirm(self, kill: Kill) -> None:
        dead = [(slot, seq) for slot, seq, hide in zip(kill.slots, kill.seqs, kill.hide, strict=True) if not hide]
        if dead and not self.closed.is_set():
            self.tell(Killed(kill.segment, [slot for slot, _ in dead], [seq for _, seq in dead]))

    async def mount(
        self, number: int, size: int, host: str = "h1", client: str = "1-1", term: int = 0, lease_ms: int = 0
    ) -> Any:
        info = SegmentInfo(number, f"{host}:{number}", size, "127.0.0.1:1", "@x", host, client)
        return await self.call(Mount(info, term, lease_ms))

    async def announce(self, number: int, records: list[Record], last: bool = True) -> Any:
        return await self.call(Announce(number, records, last))


async def open_client(port: int, client: str = "2-2", host: str = "h1") -> Wire:
    wire = Wire()
    await wire.connect(port)
    await wire.hello("client", client, host)
    return wire


async def open_owner(port: int, number: int = 7, size: int = 1 << 20, host: str = "h1", client: str = "1-1") -> Owner:
    """An owner with one new segment mounted."""
    owner = Owner()
    await owner.connect(port)
    await owner.hello("segment", client, host)
    await owner.mount(number, size, host, client)
    return owner
