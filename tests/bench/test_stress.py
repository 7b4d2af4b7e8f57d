"""`mooncake bench stress`: two processes, a real pool, and values that are not what they should be."""

import signal

import pytest

MIB = 1 << 20


@pytest.fixture
def stress(bench, master):
    def start(role: str, *more, **options):
        return bench(
            "stress", "--role", role, "--master-server", master.address, "--local-hostname", "127.0.0.1",
            "--max-requests", 40, "--value-length", "64KB", "--local-buffer-size", 1, *more, **options,
        )  # fmt: skip

    return start


def prefill(stress, *more):
    return stress("prefill", "--global-segment-size", 16, "--wait-time", 60, *more)


@pytest.mark.parametrize("how", [(), ("--batch-size", 7, "--num-workers", 3), ("--value-length", 1001)])
def test_what_prefill_puts_decode_gets(stress, master, how):
    puts = prefill(stress, *how)
    gets = stress("decode", *how)  # at once: it waits for what is not there yet
    code, out, err = gets.end()
    assert (code, err) == (0, "")
    assert "decode: 40 values" in out
    assert "GB/s" in out
    assert "p99" in out
    assert out.endswith("Every byte was right.\n")
    puts.read_until("The values stay for 60 s")
    assert master.metric("master_key_count") == 40
    code, _, err = puts.end(signal.SIGINT)
    assert (code, err) == (130, "")
    assert master.metric("master_key_count") == 0, "it takes its values with it"


def test_over_tcp(stress):
    puts = stress("prefill", "--global-segment-size", 16, "--wait-time", 60, MC_FORCE_TCP="1")
    code, out, err = stress("decode", "--batch-size", 4, MC_FORCE_TCP="1").end()
    assert (code, err) == (0, "")
    assert "Every byte was right." in out
    assert puts.end(signal.SIGTERM)[0] == 130


def test_a_wrong_byte_is_told(stress, make_store):
    puts = prefill(stress)
    puts.read_until("The values stay")
    store = make_store(segment=16 * MIB)
    value = bytearray(store.get("stress/0/65536/11"))
    value[4242] ^= 0x10
    assert store.remove("stress/0/65536/11", True) == 0
    assert store.put("stress/0/65536/11", bytes(value)) == 0
    code, out, err = stress("decode").end()
    assert code == 1
    assert err == (
        "mooncake: stress/0/65536/11 is corrupt: 1 of its 65536 bytes are wrong, the first at offset 4242.\n"
    )
    assert "Every byte was right" not in out


def test_anothers_value_is_told(stress, make_store):
    puts = prefill(stress)
    puts.read_until("The values stay")
    store = make_store(segment=16 * MIB)
    other = store.get("stress/0/65536/12")
    assert store.remove("stress/0/65536/11", True) == 0
    assert store.put("stress/0/65536/11", other) == 0
    code, _, err = stress("decode").end()
    assert code == 1
    assert err.endswith("it says that it is value 12 of 65536 bytes with seed 0.\n")


def test_values_that_never_come(stress):
    code, _, err = stress("decode", "--wait-time", 1).end()
    assert code == 1
    assert err.startswith("mooncake: stress/0/65536/0 was not in the pool for 1 s: start --role prefill")


def test_a_pool_that_is_too_small(stress):
    code, _, err = stress("prefill", "--global-segment-size", 1, "--value-length", "256KB", "--batch-size", 40).end()
    assert code == 1
    assert "failed with -200 NO_AVAILABLE_HANDLE: the pool has no room left for it; all values together" in err


def test_a_master_that_dies(stress, master):
    puts = prefill(stress)
    puts.read_until("The values stay")
    master.kill()
    code, _, err = stress("decode").end()
    assert code == 1
    assert "mooncake: The store could not be set up (" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "the following arguments are required: --role"),
        (("--role", "both"), "invalid choice: 'both'"),
        (("--role", "decode", "--batch-size", "0"), "argument --batch-size: expected a number above 0, but found 0"),
        (("--role", "decode", "--value-length", "0"), "--value-length is 0; expected a positive number of bytes"),
        (("--role", "decode", "--global-segment-size", "much"), "expected a size in bytes"),
        (("--role", "decode", "--batchsize", "1"), "the flag --batchsize is unknown (did you mean --batch-size?)"),
    ],
)
def test_wrong_flags(bench, arguments, message):
    code, out, err = bench("stress", *arguments).end()
    assert code in (1, 2)
    assert message in err
    assert out == ""
    assert err.count("\n") == 1, "one sentence"
