"""SGLang's prefill hands KV cache to its decode over our transfer engine; see sglang_transfer.py."""

import pytest

from tests.processes import free_port

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(120)]

LOOPBACK = {"SGLANG_HOST_IP": "127.0.0.1"}


@pytest.mark.parametrize("route", [{}, {"MC_FORCE_TCP": "1"}], ids=["same host", "tcp"])
def test_prompts_in_chunks(sglang, route):
    port, rooms = free_port(), [2, 3, 11]
    prefill = sglang.start("sglang_transfer.prefill", LOOPBACK | route, port=port, rooms=rooms)
    decode = sglang.start("sglang_transfer.decode", LOOPBACK | route, port=port, rooms=rooms)
    assert decode.result() == [["Success", True, room] for room in rooms]
    assert prefill.result() == ["Success"] * 3


def test_decode_dies(sglang):
    port = free_port()
    victim = sglang.start("sglang_transfer.decode_that_waits", LOOPBACK, port=port, room=4)
    prefill = sglang.start(
        "sglang_transfer.prefill_that_loses_decode", LOOPBACK, port=port, victim=victim.pid, lost=4, rooms=[5, 6]
    )
    victim.wait()
    decode = sglang.start("sglang_transfer.decode", LOOPBACK, port=port, rooms=[5, 6])
    assert decode.result() == [["Success", True, 5], ["Success", True, 6]]
    assert prefill.result() == {
        "alive": 0,
        "lost": "Failed",
        "soon": True,
        "given up": True,
        "stays": True,
        "next": ["Success"],
        "comes back": True,
        "after that": ["Success"],
    }


def test_its_transfer_engine(sglang):
    assert sglang.run("sglang_transfer.engine_alone", LOOPBACK) == {
        "batch": 0,
        "again": True,
        "probe": 0,
        "one": 0,
        "many": 0,
        "beyond": True,
        "nobody": True,
        "device": "mlx5_0,mlx5_1",
        "inner": True,
        "leave": 0,
        "same": True,
    }
