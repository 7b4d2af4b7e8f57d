"""Writers that are stopped, or outlived by their master, at the worst moment."""

import signal
import time

import pytest

from mooncake.errors import StoreError
from mooncake.rpc.messages import Mount, SegmentInfo
from tests.faults.test_kills import used
from tests.processes import wait_until
from tests.wire import greeted

pytestmark = pytest.mark.slow

MIB = 1 << 20

STOP_BEFORE_RECORD = """
import os, signal
from mooncake.rpc.messages import PutStart
def stopped(self, *args):
    grants = original(self, *args)
    if isinstance(args[0], PutStart):
        os.kill(os.getpid(), signal.SIGSTOP)
    return grants
from mooncake.rpc.client import Client
original, Client._call = Client._call, stopped
"""


@pytest.mark.parametrize("force_tcp", ["", "1"])
@pytest.mark.parametrize(
    "put",
    ["store.put('-late', b'L' * 1000)", "store.put_batch(['-late', '-late2'], [b'L' * 1000, b'M' * 1000])"],
    ids=["one", "batch"],
)
def test_a_writer_stopped_before_its_record_cannot_hurt_the_next_one_there(
    make_master, make_store, make_worker, force_tcp, put
):
    """Its table slots were given to others meanwhile.  Their records must stay: a new master reads them."""
    master = make_master("--put_start_discard_timeout_sec=1", "--put_start_release_timeout_sec=1")
    owner = make_store(16 * MIB, at=master)
    writer = make_worker(at=master, env={"MC_FORCE_TCP": force_tcp})
    assert writer("result = store.put('warm', b'v')") == 0
    before = used(master)
    writer(STOP_BEFORE_RECORD)
    writer.send(f"result = {put}")
    wait_until(lambda: used(master) > before, 5)
    wait_until(lambda: used(master) == before, 5)
    values = {f"k{i}": b"%d" % i for i in range(20)}
    for key, value in values.items():
        assert owner.put(key, value) == 0
    writer.signal(signal.SIGCONT)
    assert writer.receive() != 0
    master.kill()
    master.start()
    wait_until(lambda: owner.is_exist("k19") == 1, 5)
    time.sleep(0.1)
    assert dict(zip(values, owner.get_batch(list(values)), strict=True)) == values
    assert owner.get("-late") == b""


def test_what_a_small_put_acknowledged_is_known_to_the_next_master(master, make_store, make_worker):
    """A small put does not wait for the master's last word; but one whose master ended while it copied has no right
    to say that it succeeded."""
    owner = make_store(16 * MIB)
    writer = make_worker()
    assert writer("result = store.put('warm', b'v')") == 0
    writer("""
import os, signal
from mooncake.client import put
from mooncake.transfer import shm
put.EAGER_LIMIT = 100
class Slow:
    def __getattr__(self, name):
        return getattr(original, name)
    def memmove(self, *args):
        os.kill(os.getpid(), signal.SIGSTOP)
        return original.memmove(*args)
original, shm.ctypes = shm.ctypes, Slow()
""")
    writer.send("result = store.put('k', b'value' * 100)")
    wait_until(lambda: used(master) > 256, 5)
    time.sleep(0.1)
    master.kill()
    master.start()
    wait_until(lambda: owner.is_exist("warm") == 1, 5)
    time.sleep(0.1)
    writer.signal(signal.SIGCONT)
    code = writer.receive()
    time.sleep(0.2)
    assert owner.get("k") == (b"value" * 100 if code == 0 else b"")
    wait_until(lambda: owner.put("k", b"again") == 0 and owner.get("k") == b"again", 3)


def test_puts_go_on_when_the_term_rises_under_a_master(master, make_store):
    """Its clock had been set back, and a segment of its predecessor returns: the numbers of its grants change while
    its clients stay connected."""
    store = make_store(16 * MIB)
    assert store.put("a", b"x") == 0
    returning = greeted(master.port, "segment", "7-7")
    info = SegmentInfo(77, "seg", MIB, "127.0.0.1:1", "@x", "h", "7-7")
    with pytest.raises(StoreError, match="term is"):
        returning.call(Mount(info, (1 << 42) - 5, 10))
    returning.close()
    wait_until(lambda: store.put("b", b"x") == 0, 3)
    for i in range(20):
        assert store.put(f"c{i}", b"x") == 0
        assert store.put_batch([f"d{i}", f"e{i}"], [b"1", b"2"]) == 0
    assert store.get("a") == b"x"
