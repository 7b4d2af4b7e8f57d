"""The indexer, with publishers as vLLM has them, and with a real master."""

import json
import os
import subprocess

import pytest
from xxhash import xxh3_64_intdigest

from mooncake.errors import ConfigError
from mooncake.indexer.config import read_config
from tests.events.indexer import Conductor
from tests.events.publisher import CLEARED, Publisher, chain, removed, stored
from tests.processes import BIN, wait_until
from tests.proxy.processes import http

PROMPT = list(range(100, 140))  # ten blocks of 4


@pytest.fixture(scope="module")
def conductor():
    made = Conductor()
    yield made
    made.stop()


@pytest.fixture
def follow(conductor, cleanup, request):
    """A registered publisher; gone after the test."""

    def make(name: str, size: int = 4, kept: int = 1000, as_lists: bool = False, **more) -> Publisher:
        publisher = Publisher(kept, as_lists)
        cleanup.callback(publisher.stop)
        conductor.register(name, publisher, size, **more)
        cleanup.callback(conductor.post, "/unregister", instance_id=name, tenant_id=more.get("tenant_id") or "default")
        return publisher

    return make


def sequence_hashes(tokens: list[int], size: int) -> list[int]:
    """As docs/kv_events.md has them."""
    hashes: list[int] = []
    for at in range(0, len(tokens) - size + 1, size):
        block = xxh3_64_intdigest(b"".join(token.to_bytes(4, "little") for token in tokens[at : at + size]))
        before = hashes[-1].to_bytes(8, "little") if hashes else b""
        hashes.append(xxh3_64_intdigest(before + block.to_bytes(8, "little")) if hashes else block)
    return hashes


# ---------------------------------------------------------------- what is told


@pytest.mark.parametrize("as_lists", [False, True], ids=["maps", "lists"])
def test_prefixes_of_two_instances(conductor, follow, as_lists):
    one, two = follow("one", as_lists=as_lists), follow("two", as_lists=as_lists)
    one.publish(stored(PROMPT, 4, 0, 3), stored(PROMPT, 4, 3, 2))
    two.publish(stored(PROMPT, 4, 0, 1))
    conductor.wait_longest(PROMPT, {"one": 20, "two": 4})
    assert conductor.query(PROMPT)["one"] == {
        "longest_matched": 20,
        "GPU": 20,
        "DP": {"0": 20},
        "CPU": 0,
        "DISK": 0,
    }
    assert conductor.longest(PROMPT[:11]) == {"one": 8, "two": 4}  # whole blocks
    assert conductor.longest([1, *PROMPT]) == {"one": 0, "two": 0}
    assert conductor.longest([]) == {"one": 0, "two": 0}
    assert conductor.longest(PROMPT, instance_id="two") == {"two": 4}
    assert conductor.longest(PROMPT, block_size=8) == {}
    assert conductor.longest(PROMPT, model="other") == {}
    assert conductor.longest(PROMPT, tenant_id="other") == {}


def test_removal_and_clearing(conductor, follow):
    engine = follow("e")
    engine.publish(stored(PROMPT, 4))
    conductor.wait_longest(PROMPT, {"e": 40})
    engine.publish(removed(PROMPT, 4, 6))
    conductor.wait_longest(PROMPT, {"e": 24})
    engine.publish(removed(PROMPT, 4, 2, 1))  # in the middle: what comes after it is of no use
    conductor.wait_longest(PROMPT, {"e": 8})
    engine.publish(stored(PROMPT, 4, 2, 1))
    conductor.wait_longest(PROMPT, {"e": 24})
    engine.publish(stored(PROMPT, 4, 0, 1, medium="CPU"), CLEARED)
    conductor.wait_longest(PROMPT, {"e": 4})
    assert conductor.query(PROMPT)["e"]["CPU"] == 4


def test_media_and_ranks(conductor, follow, cleanup):
    zero = follow("e")
    other = Publisher()
    cleanup.callback(other.stop)
    conductor.register("e", other, dp_rank=1)
    zero.publish(stored(PROMPT, 4, 0, 2))
    other.publish(stored(PROMPT, 4, 0, 4), stored(PROMPT, 4, 0, 6, medium="CPU"))
    zero.publish(stored(PROMPT, 4, 0, 7, medium="STORAGE"))
    conductor.wait_longest(PROMPT, {"e": 28})
    wait_until(
        lambda: (
            conductor.query(PROMPT)["e"]
            == {"longest_matched": 28, "GPU": 16, "DP": {"0": 8, "1": 16}, "CPU": 24, "DISK": 28}
        )
    )
    status, answer = conductor.post("/unregister", instance_id="e", dp_rank=1)
    assert (status, answer) == (200, {"status": "unregistered successfully", "removed_instances": ["e|default|1"]})
    assert conductor.query(PROMPT)["e"]["DP"] == {"0": 8}


def test_tenants_adapters_and_salts(conductor, follow):
    engine = follow("e", tenant_id="t")
    engine.publish(
        stored(PROMPT, 4, 0, 2),
        stored([501, *PROMPT], 4, 0, 3, lora_name="ada", extra_keys=[["ada"]] * 3),
        stored([502, *PROMPT], 4, 0, 3, extra_keys=[["salt"], None, None]),
        stored([503, *PROMPT], 4, 0, 3, extra_keys=[[["image", 0]], None, None]),
    )
    conductor.wait_longest(PROMPT, {"e": 8}, tenant_id="t")
    assert conductor.longest(PROMPT, tenant_id="t", lora_name="ada") == {"e": 0}
    assert conductor.longest([501, *PROMPT], tenant_id="t", lora_name="ada") == {"e": 12}
    assert conductor.longest([501, *PROMPT], tenant_id="t") == {"e": 0}
    assert conductor.longest([502, *PROMPT], tenant_id="t", cache_salt="salt") == {"e": 12}
    assert conductor.longest([502, *PROMPT], tenant_id="t", cache_salt="other") == {"e": 0}
    assert conductor.longest([503, *PROMPT], tenant_id="t") == {"e": 0}
    engine.publish(stored([502, *PROMPT], 4, 0, 5, medium="CPU"))  # by a connector that does not tell the salt
    conductor.wait_longest([502, *PROMPT], {"e": 20}, tenant_id="t", cache_salt="salt")
    assert conductor.longest([502, *PROMPT], tenant_id="t") == {"e": 0}


def test_an_instance_of_one_adapter(conductor, follow):
    """Whose events tell it, or not."""
    engine = follow("e", lora_name="ada", tenant_id=None, dp_rank=None)
    engine.publish(stored([601, *PROMPT], 4, 0, 2, lora_name="ada"), stored([602, *PROMPT], 4, 0, 3))
    conductor.wait_longest([602, *PROMPT], {"e": 12}, lora_name="ada")
    assert conductor.longest([601, *PROMPT], lora_name="ada") == {"e": 8}
    assert conductor.longest(PROMPT) == {}


def test_groups_of_layers(conductor, follow):
    """A sliding window's blocks do not show that a prefix is there."""
    engine = follow("e")
    engine.publish(
        stored(PROMPT, 4, 0, 3, group_idx=0, kv_cache_spec_kind="full_attention"),
        stored(PROMPT, 4, 0, 5, group_idx=1, kv_cache_spec_kind="sliding_window"),
    )
    conductor.wait_longest(PROMPT, {"e": 12})
    engine.publish(removed(PROMPT, 4, 0, group_idx=1))
    engine.publish(removed(PROMPT, 4, 2, group_idx=0))
    conductor.wait_longest(PROMPT, {"e": 8})


def test_a_prefix_is_there_as_far_as_every_group_has_it(conductor, follow):
    """(Fault U156.)  Five groups with blocks of 4, 8, 4 tokens, and two that say nothing of a prefix."""
    engine = follow("e", 4)
    full = {"kv_cache_spec_kind": "full_attention"}
    engine.publish(stored(PROMPT, 4, 0, 9, group_idx=0, **full))
    conductor.wait_longest(PROMPT, {"e": 36})
    engine.publish(
        stored(PROMPT, 8, 0, 3, group_idx=1, **full),
        stored(PROMPT, 4, 0, 8, group_idx=2, **full),
        stored(PROMPT, 8, 0, 5, group_idx=3, kv_cache_spec_kind="sliding_window"),
        stored(PROMPT, 4, 0, 10, group_idx=4, kv_cache_spec_kind="mamba"),
    )
    conductor.wait_longest(PROMPT, {"e": 24})
    engine.publish(removed(PROMPT, 4, 4, group_idx=2))
    conductor.wait_longest(PROMPT, {"e": 16})
    engine.publish(removed(PROMPT, 4, 0, group_idx=2), removed(PROMPT, 4, 1, group_idx=2))
    conductor.wait_longest(PROMPT, {"e": 0})
    engine.publish(stored(PROMPT, 4, 0, 10, group_idx=2, **full))
    conductor.wait_longest(PROMPT, {"e": 24})
    engine.publish(CLEARED, stored(PROMPT, 4, 0, 5, group_idx=0, **full))
    conductor.wait_longest(PROMPT, {"e": 0})
    engine.publish(stored(PROMPT, 8, 0, 5, group_idx=1, **full), stored(PROMPT, 4, 0, 3, group_idx=2, **full))
    conductor.wait_longest(PROMPT, {"e": 12})


def test_blocks_known_by_their_hash_alone(conductor, follow):
    """Offloading connectors tell no tokens."""
    engine = follow("e")
    bare = {**stored(PROMPT, 4, 0, 3, medium="CPU"), "token_ids": [], "parent_block_hash": None, "block_size": 0}
    engine.publish(stored(PROMPT, 4, 0, 3), bare, removed(PROMPT, 4, 1))
    conductor.wait_longest(PROMPT, {"e": 12})
    assert conductor.query(PROMPT)["e"]["GPU"] == 4


def test_query_by_hash(conductor, follow):
    engine = follow("e")
    engine.publish(stored(PROMPT, 4, 0, 3))
    conductor.wait_longest(PROMPT, {"e": 12})
    hashes = sequence_hashes(PROMPT, 4)
    found = {"longest_matched": 12, "GPU": 12, "DP": {"0": 12}, "CPU": 0, "DISK": 0}
    assert conductor.post("/query_by_hash", seq_hashes=hashes) == (200, {"default": {"e": found}})
    signed = [value - (1 << 64) if value >> 63 else value for value in hashes]
    assert conductor.post("/query_by_hash", seq_hashes=signed) == (200, {"default": {"e": found}})
    engines_own = conductor.post("/query_by_hash", block_hash=chain(PROMPT, 4)[1])[1]
    assert engines_own["default"]["e"]["longest_matched"] == 4
    assert conductor.post("/query_by_hash", block_hash=hashes[4])[1]["default"]["e"]["longest_matched"] == 0


# ---------------------------------------------------------------- what is missed


def test_what_was_published_before_is_replayed(conductor, cleanup):
    engine = Publisher()
    cleanup.callback(engine.stop)
    engine.publish(stored(PROMPT, 4, 0, 2))
    engine.publish(stored(PROMPT, 4, 2, 1))
    conductor.register("e", engine)
    cleanup.callback(conductor.post, "/unregister", instance_id="e")
    conductor.wait_longest(PROMPT, {"e": 12})


def test_a_gap_is_replayed(conductor, follow):
    engine = follow("e")
    engine.publish(stored(PROMPT, 4, 0, 5))
    conductor.wait_longest(PROMPT, {"e": 20})
    before = conductor.instance("e")
    engine.publish(removed(PROMPT, 4, 2), lost=True)
    engine.publish(stored(PROMPT, 4, 2, 1), lost=True)
    engine.publish(stored([1, *PROMPT], 4, 0, 1))
    conductor.wait_longest(PROMPT, {"e": 12})
    after = conductor.instance("e")
    assert [after[name] - before[name] for name in ("gaps", "replayed", "emptied")] == [1, 3, 0]
    engine.publish(stored(PROMPT, 4, 3, 1))
    conductor.wait_longest(PROMPT, {"e": 16})


@pytest.mark.parametrize("kept", [0, 1], ids=["no replay", "replay that does not reach back"])
def test_a_gap_that_cannot_be_filled_empties(conductor, follow, kept):
    engine = follow("e", kept=kept)
    engine.publish(stored(PROMPT, 4, 0, 5))
    conductor.wait_longest(PROMPT, {"e": 20})
    engine.publish(removed(PROMPT, 4, 0), lost=True)
    engine.publish(stored([1, *PROMPT], 4, 0, 1), lost=True)
    engine.publish(stored([2, *PROMPT], 4, 0, 1))
    conductor.wait_longest([2, *PROMPT], {"e": 4})
    assert conductor.longest(PROMPT) == {"e": 0}
    assert conductor.instance("e")["emptied"] == 1


@pytest.mark.parametrize("kept", [0, 100], ids=["no replay", "replay"])
def test_an_engine_that_begins_anew(conductor, follow, kept):
    engine = follow("e", kept=kept)
    for _ in range(3):
        engine.publish(stored(PROMPT, 4, 0, 5))
    conductor.wait_longest(PROMPT, {"e": 20})
    engine.stop()
    wait_until(lambda: not conductor.instance("e")["connected"], what="the loss")
    engine.start()
    engine.wait_for_subscriber()
    engine.publish(stored([1, *PROMPT], 4, 0, 1))
    conductor.wait_longest([1, *PROMPT], {"e": 4})
    assert conductor.longest(PROMPT) == {"e": 0}


@pytest.mark.slow
def test_an_engine_that_stays_away(conductor, cleanup):
    engine = Publisher(0)
    conductor.register("e", engine)
    cleanup.callback(conductor.post, "/unregister", instance_id="e")
    engine.publish(stored(PROMPT, 4, 0, 5))
    conductor.wait_longest(PROMPT, {"e": 20})
    engine.stop()
    conductor.wait_longest(PROMPT, {"e": 0})


def test_blocks_whose_beginning_is_not_known(conductor, follow):
    engine = follow("e", kept=0)
    unheard = [7000, *PROMPT]  # elsewhere too
    engine.publish(stored(unheard, 4, 1, 2))
    wait_until(lambda: conductor.instance("e")["unlinked"] == 2)
    engine.publish(stored(unheard, 4, 0, 1))
    conductor.wait_longest(unheard, {"e": 4})


def test_garbage(conductor, follow):
    engine = follow("e", kept=0)
    engine.publish(stored(PROMPT, 4, 0, 5))
    conductor.wait_longest(PROMPT, {"e": 20})
    for payload in (b"", b"\xff", b"\x93\x01\x02\x03", b"\x93\x01\x91\x80\x00"):
        engine.raw(payload)
    engine.publish({**stored(PROMPT, 4, 0, 2), "token_ids": [1]})
    engine.publish({**stored(PROMPT, 4, 0, 2), "token_ids": [-1] * 8})
    wait_until(lambda: conductor.instance("e")["misread"] == 6)
    assert conductor.longest(PROMPT) == {"e": 0}  # what was lost may have been a removal
    engine.publish(stored(PROMPT, 4, 0, 5), {"type": "SomethingNew"})
    conductor.wait_longest(PROMPT, {"e": 20})


# ---------------------------------------------------------------- a real master


def test_a_master(conductor, make_publisher, make_store, cleanup):
    """Values under sequence hashes; memory that is lost, removed, cleared."""
    master, endpoint = make_publisher()
    store = make_store(at=master)
    conductor.register("pool", endpoint)
    wait_until(lambda: conductor.instance("pool")["connected"])
    cleanup.callback(conductor.post, "/unregister", instance_id="pool")
    hashes = sequence_hashes(PROMPT, 4)
    keys = [str(hashes[0]), hex(hashes[1]), *map(str, hashes[2:])]
    assert store.put_batch(keys, [b"x"] * 10) == 0
    conductor.wait_longest(PROMPT, {"pool": 40})
    assert conductor.query(PROMPT)["pool"] == {"longest_matched": 40, "GPU": 0, "DP": {"0": 0}, "CPU": 40, "DISK": 0}
    assert store.remove(keys[5], force=True) == 0
    conductor.wait_longest(PROMPT, {"pool": 20})
    store.remove_all(force=True)
    conductor.wait_longest(PROMPT, {"pool": 0})
    assert store.put_batch(keys[:3], [b"x"] * 3) == 0
    conductor.wait_longest(PROMPT, {"pool": 12})
    master.kill()
    master.start()  # its directory comes back from the segments
    conductor.wait_longest(PROMPT, {"pool": 12})
    wait_until(lambda: master.metric("master_key_count") == 3)
    assert store.put_batch(keys[3:4], [b"x"]) == 0
    conductor.wait_longest(PROMPT, {"pool": 16})


# ---------------------------------------------------------------- the command


@pytest.mark.parametrize(
    ("path", "body", "parts"),
    [
        ("/register", {"instance_id": "x"}, ["endpoint"]),
        ("/register", {"endpoint": "tcp://h:1", "instance_id": "x", "block_size": 0}, ["block_size", "1 to"]),
        ("/register", {"endpoint": "tcp://*:1", "instance_id": "x", "block_size": 4}, ["endpoint", "tcp://*:1"]),
        ("/register", {"endpoint": "tcp://nowhere", "instance_id": "x", "block_size": 4}, ["tcp://nowhere"]),
        ("/register", [], ["object with endpoint"]),
        ("/query", {"model": "m"}, ["token_ids"]),
        ("/query", {"token_ids": [-1]}, ["token_ids"]),
        ("/query", {"token_ids": ["a"]}, ["token_ids"]),
        ("/query_by_hash", {}, ["seq_hashes or block_hash"]),
    ],
)
def test_mistakes_in_requests(conductor, path, body, parts):
    status, _, answer = http(conductor.url + path, body)
    assert status == 400
    assert all(part in answer["error"] for part in parts), answer
    assert conductor.instances() == []


def test_nothing_is_left_of_who_is_unregistered(conductor, cleanup):
    engine = Publisher()
    cleanup.callback(engine.stop)

    def come_and_go() -> int:
        conductor.register("e", engine)
        engine.publish(stored(PROMPT, 4))
        conductor.wait_longest(PROMPT, {"e": 40})
        conductor.register("e", engine, block_size=8)  # anew, in place of the first
        assert conductor.post("/unregister", instance_id="e")[0] == 200
        assert http(conductor.url + "/status")[2] == {"blocks": 0, "instances": []}
        return len(os.listdir(f"/proc/{conductor.process.pid}/fd"))

    before = come_and_go()
    for _ in range(5):
        come_and_go()
    wait_until(lambda: come_and_go() <= before, what="as few descriptors as before")


def test_unregistering_what_is_not_there(conductor):
    status, answer = conductor.post("/unregister", instance_id="nobody")
    assert status == 404
    assert "nobody" in answer["error"]


def test_the_configuration_file(tmp_path, cleanup):
    engine = Publisher()
    cleanup.callback(engine.stop)
    path = tmp_path / "conductor.json"
    where = {"endpoint": engine.endpoint, "replay_endpoint": engine.replay_endpoint}
    one = {**where, "type": "vLLM", "modelname": "m", "block_size": 4}
    path.write_text(json.dumps({"http_server_port": 1, "max_blocks": 8, "kvevent_instance": {"e": one}}))
    conductor = Conductor(CONDUCTOR_CONFIG_PATH=str(path), CONDUCTOR_SEED="7")
    cleanup.callback(conductor.stop)
    engine.publish(stored(PROMPT, 4, 0, 5))
    conductor.wait_longest(PROMPT, {"e": 20})
    first = xxh3_64_intdigest(b"".join(token.to_bytes(4, "little") for token in PROMPT[:4]), 7)
    assert conductor.post("/query_by_hash", seq_hashes=[first])[1]["default"]["e"]["GPU"] == 4
    for prompt in range(20):  # no more than eight blocks are remembered
        engine.publish(stored([prompt, *PROMPT], 4, 0, 1))
    conductor.wait_longest([19, *PROMPT], {"e": 4})
    assert http(conductor.url + "/status")[2]["blocks"] <= 8
    metrics = http(conductor.url + "/metrics")[2]
    assert "mooncake_indexer_forgotten_total" in metrics
    assert 'mooncake_indexer_blocks{instance="e",rank="0",tenant="default"} 8.0' in metrics


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("{", ["cannot be understood"]),
        ('{"http_server_port": "x"}', ["http_server_port", "whole number"]),
        ('{"port": 1}', ["port", "unknown", "http_server_port"]),
        ('{"kvevent_instance": {"e": {"endpoint": "tcp://h:1"}}}', ["kvevent_instance", "block_size"]),
        (None, ["cannot be read"]),
    ],
)
def test_mistakes_in_the_file(tmp_path, content, parts):
    path = tmp_path / "conductor.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        read_config(str(path))
    assert all(part in str(caught.value) for part in parts), caught.value


def test_a_mistake_ends_the_command():
    environment = {**os.environ, "CONDUCTOR_LOG_LEVEL": "loud"}
    run = subprocess.run([BIN / "mooncake_conductor"], env=environment, capture_output=True, text=True, timeout=20)
    assert run.returncode == 1
    assert run.stderr.count("\n") == 1
    assert "CONDUCTOR_LOG_LEVEL" in run.stderr
