"""SGLang's HiCache saves its pages in our pool and loads them from there, with its own code; see sglang_hicache.py."""

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(120)]

PAGES = 5
ROUND_TRIP = {
    "before": 0,
    "saved": [True] * 4,
    "partly": [4, [True] * 4 + [False]],
    "again": [True] * 5,
    "found": 5,
    "loaded": [True] * 5,
    "same": True,
    "key": 1,
}


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct"])
def test_pages_of_keys_and_values(sglang, master, layout):
    assert sglang.run("sglang_hicache.mha", master=master.address, layout=layout) == {**ROUND_TRIP, "written": 10}


@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
def test_latent_pages(sglang, master, layout):
    assert sglang.run("sglang_hicache.mla", master=master.address, layout=layout) == {**ROUND_TRIP, "written": 5}


def test_a_page_is_a_group(sglang, master):
    assert sglang.run("sglang_hicache.groups", master=master.address) == {**ROUND_TRIP, "written": 10}


def test_other_numbers_of_ranks(sglang, master):
    all_ = [True] * PAGES
    assert sglang.run("sglang_hicache.split_heads", master=master.address) == {
        "saved": [all_, all_],
        "found": PAGES,
        "loaded": all_,
        "same": True,
    }


def test_pool_beside_the_main_one(sglang, master):
    assert sglang.run("sglang_hicache.sidecar", master=master.address) == {
        "main": [True] * PAGES,
        "none": [],
        "saved": {"draft": [True, True]},
        "holes": [3, 4],
        "loaded": {"draft": [False, True, True]},
        "same": True,
    }


def test_store_on_the_engine_of_an_instance(sglang, master):
    result = sglang.run("sglang_hicache.reused_engine", master=master.address)
    assert result == {**ROUND_TRIP, "written": 10, "hostname": True}


def test_standalone_storage(sglang, master, mooncake_client):
    result = sglang.run(
        "sglang_hicache.standalone", master=master.address, client=mooncake_client, metrics_port=master.metrics_port
    )
    assert result == {**ROUND_TRIP, "written": 10}


def test_layer_by_layer_without_a_host_tier(sglang, master):
    assert sglang.run("sglang_linker.layers", master=master.address) == {
        "none": [],
        "offloaded": True,
        "found": [1, 2, 3, 4, 5],
        "landed": True,
        "same": True,
        "lost": False,
    }


def test_embeddings(sglang, master):
    assert sglang.run("sglang_hicache.embeddings", master=master.address) == {
        "put": [True] * 2,
        "again": [True] * 3,
        "exist": [True] * 3 + [False],
        "got": [True] * 3 + [False],
        "same": [True] * 3,
        "pieces": [True],
        "joined": [True],
        "joined same": True,
    }


def test_the_test_in_its_own_wheel(sglang, master):
    sglang.run("sglang_hicache.own_test", master=master.address)
