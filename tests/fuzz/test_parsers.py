"""Whatever comes from a socket, a file or shared memory: it is read, or refused with the error that is meant for that.

`FUZZ_EXAMPLES=100000 scripts/test tests/fuzz` looks longer than the tests do by themselves.
"""

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterable

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mooncake.errors import MetadataError, StoreError
from mooncake.indexer import events
from mooncake.indexer.config import parse_registration, read_config
from mooncake.master.config_file import read_config_file
from mooncake.master.snapshots import blocks
from mooncake.master.snapshots.file import DamagedError, Writer
from mooncake.master.snapshots.restore import Restored
from mooncake.master.tenants.policy import FilePolicy
from mooncake.mooncake_config import MooncakeConfig
from mooncake.rpc import frame
from mooncake.rpc.handshake import MOST_BYTES, Guard
from mooncake.rpc.message import Message
from mooncake.rpc.messages import DECODERS, KINDS, PROTOCOL, Exist, Hello, Prove, Welcome, encode
from mooncake.rpc.record_messages import Body
from mooncake.security.secret import Secret
from mooncake.segment.disk import entries
from mooncake.transfer import table
from mooncake.transfer.metadata.entries import Address, decode_address, encode_address
from mooncake.vllm.push import wire

FUZZ = settings(
    max_examples=int(os.environ.get("FUZZ_EXAMPLES", "300")),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def damaged(whole: bytes) -> st.SearchStrategy[bytes]:
    """`whole` with some bytes changed, cut out, put in or moved."""

    @st.composite
    def spoil(draw: st.DrawFn) -> bytes:
        data = bytearray(whole)
        for _ in range(draw(st.integers(1, 5))):
            at = draw(st.integers(0, len(data)))
            length = draw(st.sampled_from((0, 1, 1, 2, 4, 8, 40)))
            data[at : at + length] = draw(st.one_of(st.binary(max_size=9), st.just(bytes(data[-length:]))))
        return bytes(data)

    return st.one_of(spoil(), st.binary(max_size=200))


HELLO = Hello(PROTOCOL, "v", "client", "1-1", "host", b"n" * 32)
FRAMES = b"".join(
    frame.pack(KINDS[type(message)], 0, i, encode(message))
    for i, message in enumerate((HELLO, Exist(["a", "b" * 50]), Prove(b"p" * 32)))
)


@FUZZ
@given(data=damaged(FRAMES), cuts=st.lists(st.integers(0, 300), max_size=5))
def test_frames(data: bytes, cuts: list[int]) -> None:
    """In whatever pieces they come; nothing longer than is allowed is waited for."""
    reader = frame.FrameReader(MOST_BYTES)
    pieces = [data[begin:end] for begin, end in zip([0, *sorted(cuts)], [*sorted(cuts), len(data)], strict=True)]
    with contextlib.suppress(frame.FramingError):
        for piece in pieces:
            for got in reader.feed(piece):
                assert len(got.body) <= max(MOST_BYTES, len(data))


@FUZZ
@given(kind=st.sampled_from(sorted(DECODERS)), data=st.one_of(damaged(encode(HELLO)), st.binary(max_size=100)))
def test_messages(kind: int, data: bytes) -> None:
    with contextlib.suppress(msgspec.MsgspecError):
        DECODERS[kind].decode(data)


def test_a_message_cannot_be_nested_until_the_stack_ends() -> None:
    for data in (b"\x91" * 100_000, b"\x81\xa1a" * 100_000):
        for decoder in DECODERS.values():
            with pytest.raises((msgspec.MsgspecError, RecursionError)):
                decoder.decode(data)


@FUZZ
@given(steps=st.lists(st.one_of(st.binary(max_size=40), st.none(), st.just(b"n" * 32)), max_size=6))
def test_nobody_gets_in_by_chance(steps: list[bytes | None]) -> None:
    guard = Guard(Secret("the-secret-of-this-test"))
    for step in steps:
        message: Message = Exist(["k"])
        if step is not None:
            message = Prove(step) if len(step) % 2 else msgspec.structs.replace(HELLO, nonce=step)
        with contextlib.suppress(StoreError):
            assert guard.answer(message, lambda: Welcome(PROTOCOL, "v", 1, 1)) is not None
        assert not guard.is_open


# ------------------------------------------------------------ shared memory and disks


SIZE = 1 << 20


def _table() -> bytes:
    memory = bytearray(table.table_size(SIZE))
    written = table.Table(memoryview(memory))
    written.format(7, SIZE)
    written.set_term(3, 1000)
    for i, key in enumerate(("short", "k" * 300, "other")):
        body = Body(key, 10, [i * 4096, 10], group="g" * (i * 90))
        slots = list(range(i * 10, i * 10 + table.slots_needed(key, body.group, "", 1)))
        written.begin(slots, i + 1, 3, 1, body)
        written.set_state(slots[0], table.COMPLETE)
    return bytes(memory)


TABLE = _table()
USED = table.HEADER_SIZE + 30 * table.SLOT_SIZE


@FUZZ
@given(changes=st.lists(st.tuples(st.integers(0, USED), st.binary(min_size=1, max_size=9)), max_size=8))
def test_a_table_that_others_have_written_to(changes: list[tuple[int, bytes]]) -> None:
    """Every process that maps a segment can write anything there: the owner goes on."""
    memory = bytearray(TABLE)
    for at, data in changes:
        memory[at : at + len(data)] = data
    del memory[len(TABLE) :]
    read = table.Table(memoryview(memory))
    for view in read.records():
        assert all(isinstance(slot, int) for slot in view.slots)
    for slot in range(-1, 31):
        read.view(slot)


INDEX = b"".join(entries.pack(entries.Entry(1, i, i * 4096, 100, 5, b"body" * i)) for i in range(1, 4))


@FUZZ
@given(data=damaged(INDEX))
def test_an_index_of_a_disk(data: bytes) -> None:
    for entry in entries.unpack(data):
        assert entry is None or (entry.seq, entry.offset) in {(i, i * 4096) for i in range(1, 4)}


def _snapshot(parts: Iterable[blocks.Block]) -> bytes:
    writer = Writer()
    return b"".join(writer.block(blocks.encode(part)) for part in parts) + writer.end()


HEAD, DEAD = blocks.Head("c", "v", 1.0, 2, 3, 4), blocks.DeadKeys(["k"], [5])
PARTS = (HEAD, blocks.Mounted({1: "a"}), DEAD, blocks.TaskList([]))


@FUZZ
@given(data=damaged(_snapshot(PARTS)))
def test_a_snapshot(data: bytes) -> None:
    with contextlib.suppress(DamagedError):
        assert Restored(data).former.seqs == {"k": 5}


@FUZZ
@given(body=damaged(blocks.encode(DEAD)), head=st.booleans())
def test_a_snapshot_with_right_checksums(body: bytes, head: bool) -> None:
    """Of another version, or of somebody who can write files."""
    writer = Writer()
    first = writer.block(blocks.encode(HEAD)) if head else b""
    with contextlib.suppress(DamagedError):
        Restored(first + writer.block(body) + writer.end())


# ------------------------------------------------------------ other processes


@FUZZ
@given(data=damaged(encode_address(Address("host", 1234, 77))))
def test_a_metadata_entry(data: bytes) -> None:
    with contextlib.suppress(MetadataError):
        found = decode_address("name", data)
        assert found.host
        assert 0 < found.port < 65536


STORED = {"type": "BlockStored", "block_hashes": [1, 2], "token_ids": [1] * 8, "block_size": 4, "parent_block_hash": 9}
OF_MASTER = {"event_type": "stored", "seq_hashes": [1], "medium": "cpu"}
EVENTS = msgspec.msgpack.encode([1.5, [STORED, OF_MASTER, ["BlockRemoved", [1]], ["AllBlocksCleared"]], 0])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)


@FUZZ
@given(data=damaged(EVENTS))
def test_kv_events(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        events.decode(data)


@FUZZ
@given(fields=st.dictionaries(st.sampled_from(sorted({*STORED, *OF_MASTER, "group_idx", "extra_keys"})), JSON))
def test_kv_events_of_odd_values(fields: dict) -> None:
    with contextlib.suppress(ValueError):
        events.decode(msgspec.msgpack.encode([0, [fields], 0]))


FIELDS = ("endpoint", "replay_endpoint", "type", "modelname", "instance_id", "block_size", "dp_rank")


@FUZZ
@given(fields=st.dictionaries(st.sampled_from(FIELDS), JSON))
def test_a_registration(fields: dict) -> None:
    with contextlib.suppress(ValueError):
        parse_registration(fields)


GREET = wire.pack(wire.Cancel(1)) + wire.pack(wire.Ask(1, "t", 0, b"12345678", 9, 10))


@FUZZ
@given(data=damaged(GREET))
def test_what_decode_says_to_prefill(data: bytes) -> None:
    async def read_all() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        while True:
            await wire.read_to_prefill(reader)

    with pytest.raises((wire.BrokenError, asyncio.IncompleteReadError)):
        asyncio.run(read_all())


# ------------------------------------------------------------ files of users


FILES: dict[str, tuple[bytes, Callable[[str], object]]] = {
    "pool.json": (
        b'{"local_hostname": "a", "metadata_server": "b", "master_server_address": "c:1", "protocol": "tcp"}',
        MooncakeConfig.from_file,
    ),
    "master.yaml": (b"rpc_port: 50051\neviction_ratio: 0.1\nenable_offload: true\n", read_config_file),
    "quotas.yaml": (b"version: 1\ntenants:\n- {name: a, quota: 16MB}\n", lambda path: FilePolicy(path).load()),
    "conductor.json": (
        b'{"http_server_port": 13333, "kvevent_instance": {"a": {"endpoint": "tcp://h:1", "type": "vLLM"}}}',
        lambda path: read_config(path),
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_files(name: str, tmp_path) -> None:
    """Either it is taken, or a ValueError says in one sentence what is wrong with it."""
    whole, read = FILES[name]
    path = tmp_path / name

    @FUZZ
    @given(data=damaged(whole))
    def check(data: bytes) -> None:
        path.write_bytes(data)
        try:
            read(str(path))
        except ValueError as error:  # ConfigError is one
            assert str(error).strip()
            assert "\n" not in str(error).strip() or name == "pool.json", str(error)

    check()
