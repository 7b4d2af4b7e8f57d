"""Asking the master without waiting for it."""

import time

import pytest

from mooncake.client.prefixes import PrefixClient
from mooncake.rpc.messages import Need
from mooncake.vllm.lookup import Lookups
from tests.processes import wait_until
from tests.relays import SlowRelay

H = [Need(["h/"])]
HASHES = [bytes([i]) * 32 for i in range(8)]


@pytest.fixture
def lookups_at(cleanup):
    def make(address: str) -> Lookups:
        lookups = Lookups(PrefixClient(address, 1.0))
        cleanup.callback(lookups.close)
        return lookups

    return make


def answer(lookups, *arguments):
    lookup = lookups.ask(*arguments)
    wait_until(lambda: lookup.answered, 5)
    return lookup


def test_one_round_trip_for_all_that_was_asked_meanwhile(master, store, lookups_at, cleanup):
    store.put_batch([f"h/{value.hex()}" for value in HASHES[:5]], [b"v"] * 5)
    relay = SlowRelay(f"127.0.0.1:{master.port}", 0.05)
    cleanup.callback(relay.close)
    lookups = lookups_at(relay.address)
    began = time.monotonic()
    asked = [lookups.ask(H, first, HASHES[first:], "") for first in range(8)]
    asked += [lookups.ask(H, 0, HASHES[:3], "") for _ in range(92)]
    assert time.monotonic() - began < 0.04  # nobody waited for an answer
    wait_until(lambda: all(lookup.answered for lookup in asked), 5)
    assert time.monotonic() - began < 1
    assert [lookup.count for lookup in asked[:8]] == [5, 4, 3, 2, 1, 0, 0, 0]
    assert [lookup.count for lookup in asked[8:]] == [3] * 92
    assert asked[1].end == 5
    assert asked[1].serves(1)
    assert asked[1].serves(5)
    assert not asked[1].serves(0)
    assert not asked[1].serves(6)


def test_groups_of_layers_are_asked_for_together(store, lookups_at, master):
    """All blocks of one group and the last two of another, at every second hash."""
    store.put_batch([f"all/{value.hex()}" for value in HASHES], [b"v"] * 8)
    store.put_batch([f"window/{HASHES[i].hex()}" for i in (2, 3, 5)], [b"v"] * 3)
    needs = [Need(["all/"]), Need(["window/"], last=2)]
    lookup = answer(lookups_at(master.address), needs, 7, HASHES, "", 2)
    assert (lookup.count, lookup.end) == (2, 9)


def test_a_master_that_is_gone(master, lookups_at):
    lookups = lookups_at(master.address)
    assert answer(lookups, H, 0, HASHES, "").reason == ""
    master.kill()
    assert answer(lookups, H, 0, HASHES, "").reason == "master_error"
    down = lookups.ask(H, 0, HASHES, "")
    assert (down.count, down.reason) == (0, "master_down")  # at once
    master.start()
    wait_until(lambda: answer(lookups, H, 0, HASHES, "").reason == "", 5)


def test_a_late_answer_changes_nothing(master, store, lookups_at):
    store.put_batch([f"h/{value.hex()}" for value in HASHES], [b"v"] * 8)
    lookups = lookups_at(master.address)
    lookup = lookups.ask(H, 0, HASHES, "")
    lookup.settle(0, "late")
    time.sleep(0.1)
    assert (lookup.count, lookup.reason) == (0, "late")


def test_adapters_are_told_apart_by_content(master, store, lookups_at, tmp_path):
    (tmp_path / "adapter_model.safetensors").write_bytes(b"weights")
    lookups = lookups_at(master.address)
    assert lookups.adapter("") == ""
    assert lookups.adapter(str(tmp_path)) is None
    assert answer(lookups, H, 0, HASHES, str(tmp_path)).count == 0
    adapter = lookups.adapter(str(tmp_path))
    assert adapter
    store.put_batch([f"h/{adapter}{value.hex()}" for value in HASHES[:3]], [b"v"] * 3)
    assert answer(lookups, H, 0, HASHES, str(tmp_path)).count == 3
    assert answer(lookups, H, 0, HASHES, "").count == 0
    missing = answer(lookups, H, 0, HASHES, str(tmp_path / "no"))
    assert (missing.count, missing.reason) == (0, "adapter_unreadable")


def test_removing(master, store, lookups_at):
    store.put_batch([f"{head}/{value.hex()}" for head in ("h", "k") for value in HASHES], [b"v"] * 16)
    lookups = lookups_at(master.address)
    assert lookups.remove("^h/", 5)
    assert answer(lookups, H, 0, HASHES, "").count == 0
    assert answer(lookups, [Need(["k/"])], 0, HASHES, "").count == 8
    master.kill()
    assert not lookups.remove("^h/", 5)
