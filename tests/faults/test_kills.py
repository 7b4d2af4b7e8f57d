"""Processes die, stop and come back: survivors' calls end in time, bytes are never wrong, space comes back."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.processes import SETUP, children, gone, wait_until

MIB = 1 << 20

PATTERN = """
import numpy as np
def pattern(i, size):
    return np.random.default_rng(i).integers(0, 256, size, np.uint8).tobytes()
"""


def pattern(i: int, size: int) -> bytes:
    return np.random.default_rng(i).integers(0, 256, size, np.uint8).tobytes()


def timed(call, *args):
    start = time.monotonic()
    return call(*args), time.monotonic() - start


def used(master) -> float:
    return master.metric("master_allocated_bytes")


def test_master_killed_and_restarted_keeps_every_acknowledged_value(master, make_store, make_worker):
    owner = make_store()
    other = make_worker()
    other(PATTERN + "result = [store.put(f'k{i}', pattern(i, 1000 + 977 * i)) for i in range(60)]")
    master.kill()
    got, took = timed(owner.get, "k0")
    assert got == b""
    assert took < 1.5
    assert timed(owner.put, "x", b"v")[0] == -900
    for _ in range(20):
        assert timed(owner.is_exist, "k0")[1] < 0.05  # known to be down: at once
    assert owner.health_check() == 2
    master.start()
    wait_until(lambda: owner.is_exist("k59") == 1, 5, "the directory was rebuilt")
    for i in range(60):
        assert owner.get(f"k{i}") == pattern(i, 1000 + 977 * i)
    assert owner.put("after", b"v") == 0
    assert other("result = store.get('after').decode()") == "v"


def test_removed_values_stay_removed_through_a_restart(master, make_store):
    store = make_store()
    for i in range(20):
        assert store.put(f"k{i}", b"old%d" % i) == 0
    for i in range(0, 20, 2):
        assert store.remove(f"k{i}", force=True) == 0
    assert store.put("k0", b"new") == 0
    time.sleep(0.2)
    master.kill()
    master.start()
    wait_until(lambda: store.is_exist("k1") == 1, 5)
    assert store.get("k0") == b"new"
    for i in range(1, 20):
        assert store.get(f"k{i}") == (b"old%d" % i if i % 2 else b"")


def test_master_restarted_many_times_under_load(master, make_store, make_worker):
    make_store(128 * MIB)
    writers = [make_worker() for _ in range(2)]
    code = (
        PATTERN
        + """
import time
acknowledged, wrong = [], []
end = time.monotonic() + seconds
i = first
while time.monotonic() < end:
    if len(acknowledged) < 2000 and store.put(f'r{i}', pattern(i, 20000)) == 0:  # all fit: none is evicted
        acknowledged.append(i)
    j = acknowledged[i % len(acknowledged)] if acknowledged else None
    if j is not None:
        value = store.get(f'r{j}')
        if value not in (b'', pattern(j, 20000)):
            wrong.append(j)
    i += 1
result = [acknowledged, wrong]
"""
    )
    for n, writer in enumerate(writers):
        writer.send(code, seconds=4, first=n * 1_000_000)
    for _ in range(3):
        time.sleep(0.9)
        master.kill()
        master.start()
    results = [writer.receive() for writer in writers]
    for writer, (acknowledged, wrong) in zip(writers, results, strict=True):
        assert not wrong
        assert acknowledged
        wait_until(lambda w=writer: w("result = store.health_check()") == 0, 5)
        wait_until(lambda w=writer, a=acknowledged: w("result = store.is_exist(key)", key=f"r{a[0]}") == 1, 5)
        missing = writer("result = [i for i in ids if store.get(f'r{i}') != pattern(i, 20000)]", ids=acknowledged)
        assert not missing


def test_master_stopped_calls_end_within_their_limit(master, make_store):
    store = make_store()
    store.put("k", b"v")
    master.signal(signal.SIGSTOP)
    try:
        code, took = timed(store.put, "x", b"v")
        assert code in (-900, -901)
        assert took < 2.5
        assert timed(store.is_exist, "k")[1] < 0.5
    finally:
        master.signal(signal.SIGCONT)
    wait_until(lambda: store.get("k") == b"v", 5)


def test_writer_killed_in_mid_put_gives_its_space_back(master, make_store, make_worker):
    survivor = make_store(512 * MIB)
    writer = make_worker(buffer=512 * MIB)
    writer("""
import ctypes, mmap
room = mmap.mmap(-1, 400 << 20)
base = ctypes.addressof(ctypes.c_char.from_buffer(room))
""")  # fresh pages and unregistered: a slow copy
    writer.send("result = store.put_from('big', base, 400 << 20)")
    wait_until(lambda: used(master) > 0, 5)
    time.sleep(0.03)
    writer.kill()
    if survivor.is_exist("big") != 1:  # it was in the middle
        wait_until(lambda: used(master) == 0, 2.5, "the dead writer's space came back")
        assert survivor.get_size("big") == -704
        assert survivor.put("big", b"again") == 0
        assert survivor.get("big") == b"again"


def test_stopped_writer_cannot_hurt_the_next_owner(make_master, make_store, make_worker):
    """Its extents stay quarantined while it could still write, however long that is."""
    master = make_master("--put_start_discard_timeout_sec=1")
    survivor = make_store(64 * MIB, at=master)
    writer = make_worker(buffer=64 * MIB, at=master)
    writer("""
import ctypes, mmap, threading, os, signal
from mooncake.transfer import room as ways
def stop_before_copy(*args):
    os.kill(os.getpid(), signal.SIGSTOP)
    return original(*args)
original, ways.gather = ways.gather, stop_before_copy
value = b'L' * (40 << 20)
""")
    writer.send("result = store.put('late', value)")
    wait_until(lambda: used(master) > 0, 5)
    time.sleep(1.3)
    assert survivor.put("late", b"N" * 1000) == 0  # discarded, and granted anew elsewhere
    assert survivor.put("huge", b"H" * (30 * MIB)) == -200  # the quarantined 40 MiB are not given out
    assert master.metric("mooncake_quarantined_bytes") >= 40 * MIB
    writer.signal(signal.SIGCONT)
    assert writer.receive() != 0
    wait_until(lambda: survivor.put("huge", b"H" * (30 * MIB)) == 0, 3, "the space came back")
    assert survivor.get("late") == b"N" * 1000
    assert survivor.get("huge") == b"H" * (30 * MIB)


def test_reader_killed_leaves_nothing_behind(make_master, make_store, make_worker):
    master = make_master("--default_kv_lease_ttl=1s")  # when the reader is killed before it has handed its lease back
    store = make_store(at=master)
    store.put("k", b"v" * MIB)
    reader = make_worker(at=master)
    assert reader("result = len(store.get('k'))") == MIB
    time.sleep(0.1)  # its lease is handed back within 10 ms; one that was not ends with its time
    reader.kill()
    assert store.remove("k", force=True) == 0
    wait_until(lambda: used(master) == 0, 3)


def test_stopped_reader_is_told_that_its_lease_ran_out(make_master, make_store, make_worker):
    master = make_master("--default_kv_lease_ttl=500")
    owner = make_store(32 * MIB, at=master)
    reader = make_worker(at=master)
    owner.put("k", b"K" * (8 * MIB))
    reader("""
import os, signal
from mooncake.transfer import room as ways
def stop_before_copy(*args):
    os.kill(os.getpid(), signal.SIGSTOP)
    return original(*args)
original, ways.scatter = ways.scatter, stop_before_copy
import numpy as np
room = np.zeros(8 << 20, np.uint8)
store.register_buffer(room.ctypes.data, room.nbytes)
""")
    reader.send("result = [store.get_into('k', room.ctypes.data, room.nbytes), store.get('k')[:1].decode()]")
    time.sleep(1.5)
    assert owner.remove("k", force=True) == 0
    for i in range(6):
        assert owner.put(f"f{i}", b"F" * (5 * MIB)) == 0  # the whole pool anew
    reader.signal(signal.SIGCONT)
    time.sleep(0.3)
    reader.signal(signal.SIGCONT)  # the second get stops as well if it found something
    code, first = reader.receive()
    assert code == -707
    assert first in ("", "K")


def test_segment_server_killed(master, make_store, make_worker):
    owner = make_worker(64 * MIB)
    survivor = make_store(64 * MIB)
    keys = [f"k{i}" for i in range(40)]
    for i, key in enumerate(keys):
        assert survivor.put(key, pattern(i, 10_000)) == 0
    (server,) = children(owner.pid)
    os.kill(server, signal.SIGKILL)
    for i, key in enumerate(keys):
        value, took = timed(survivor.get, key)
        assert value in (b"", pattern(i, 10_000))
        assert took < 1.5
        code, took = timed(survivor.put, f"new{i}", b"v")
        assert code in (0, -800)
        assert took < 1.5
    wait_until(lambda: len(master.get("/get_all_segments").split()) == 1, 5)
    there = [i for i, found in enumerate(survivor.batch_is_exist(keys)) if found]
    assert 0 < len(there) < len(keys)
    for i in there:
        assert survivor.get(keys[i]) == pattern(i, 10_000)
    for i in range(5):
        assert survivor.put(f"later{i}", b"v") == 0


def test_engine_killed_takes_its_private_server_along(master, make_worker):
    engine = make_worker(64 * MIB)
    (server,) = children(engine.pid)
    engine.kill()
    wait_until(lambda: gone(server), 2)
    wait_until(lambda: not master.get("/get_all_segments").split(), 5)


def test_close_leaves_no_process_and_no_zombie(master, make_store):
    before = set(children(os.getpid()))
    store = make_store()
    assert set(children(os.getpid())) - before
    assert timed(store.close)[1] < 1
    wait_until(lambda: set(children(os.getpid())) == before, 3)
    assert not master.get("/get_all_segments").split()


@pytest.mark.parametrize("segment", [0, 16 * MIB])
def test_exit_without_close(master, segment):
    code = (
        SETUP
        + "\nassert result == 0\nassert store.put('k', b'v') == 0 or not segment\nassert store.get('k') in (b'v', b'')"
    )
    names = {"host": "127.0.0.1", "segment": segment, "buffer": MIB, "master": master.address}
    for _ in range(5):
        run = subprocess.run(
            [
                sys.executable,
                "-c",
                "\n".join(f"{k} = {v!r}" for k, v in names.items()) + code.replace("k'", f"k{segment}'"),
            ],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
        if segment:
            assert (run.returncode, run.stderr) == (0, "")
    wait_until(lambda: not master.get("/get_all_segments").split(), 5)


def test_a_forked_child_is_told_to_set_up_its_own(store):
    store.put("k", b"v")
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            store.get("k")
            text = "no error"
        except RuntimeError as error:
            text = str(error)
        store.close()
        os.write(write, text.encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert b"forked child" in os.read(read, 1000)
    os.close(read)
    os.close(write)
    assert store.get("k") == b"v"  # the parent's is untouched


def test_ctrl_c_is_for_the_engine(master, make_worker):
    engine = make_worker(16 * MIB)
    (server,) = children(engine.pid)
    os.kill(server, signal.SIGINT)
    time.sleep(0.2)
    assert not gone(server)
    assert engine("result = store.put('k', b'v')") == 0
