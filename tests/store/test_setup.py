"""setup(): both forms, every parameter, and what is refused with which code and sentence."""

import json
import os
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path
from urllib.request import urlopen

import pytest

from mooncake.store import MooncakeDistributedStore
from tests.processes import BIN, children, free_port, gone, wait_until

MIB = 1 << 20


@pytest.fixture
def fresh(cleanup):
    store = MooncakeDistributedStore()
    cleanup.callback(store.close)
    return store


def test_dictionary_form_with_sizes_in_text(master, fresh):
    settings = {
        "local_hostname": "127.0.0.1",
        "metadata_server": "P2PHANDSHAKE",
        "global_segment_size": "16 MB",
        "local_buffer_size": "4MB",
        "master_server_addr": master.address,
    }
    assert fresh.setup(settings) == 0
    assert fresh.put("k", b"v" * 4 * MIB) == 0
    assert fresh.put("l", b"v" * (4 * MIB + 1)) == -600
    assert master.get("/query_segment?segment=" + fresh.get_hostname()).splitlines()[2].endswith(str(16 * MIB))


def test_dictionary_form_lacks_or_has_wrong_fields(master, fresh, caplog):
    good = {"local_hostname": "127.0.0.1", "metadata_server": "P2PHANDSHAKE", "master_server_addr": master.address}
    for name in ("local_hostname", "metadata_server"):
        assert fresh.setup({k: v for k, v in good.items() if k != name}) == -600
        assert name in caplog.records[-1].message
    assert fresh.setup({**good, "global_segment_size": "50%"}) == -600
    assert "global_segment_size" in caplog.records[-1].message
    assert fresh.setup({**good, "local_buffer_size": "2TB"}) in (-1, -600)
    assert fresh.setup(good) == 0


def test_dictionary_form_by_the_names_of_configuration_files(master, fresh, caplog):
    settings = {"local_hostname": "127.0.0.1", "metadata_server": "P2PHANDSHAKE", "device_name": "mlx5_0"}
    assert fresh.setup({**settings, "master_server_address": master.address, "transfer_timeout": 1}) == 0
    assert fresh.put("k", b"v") == 0
    assert "does not know transfer_timeout" in caplog.records[-1].message
    both = {"master_server_address": "127.0.0.1:1", "master_server_addr": master.address}
    assert fresh.setup({**settings, **both}) == 0


def test_keywords_and_extra_arguments(master, fresh):
    arguments = ("127.0.0.1", "P2PHANDSHAKE", MIB, MIB, "tcp", "", master.address)
    assert fresh.setup(*arguments, None, False, "", "default", False, 9300) == 0
    assert (
        fresh.setup(
            *arguments[:3],
            local_buffer_size=MIB,
            protocol="tcp",
            rdma_devices="x",
            master_server_addr=master.address,
            tenant_id="",
        )
        == 0
    )
    with pytest.raises(TypeError, match="master_server_addr"):
        fresh.setup(*arguments[:6])
    with pytest.raises(TypeError, match="nonsense"):
        fresh.setup(*arguments, nonsense=1)


@pytest.mark.parametrize(
    ("change", "code", "word"),
    [
        ({0: ""}, -600, "local_hostname"),
        ({0: "no-such-host.invalid"}, -1, "does not resolve"),
        ({1: "http://127.0.0.1:1/metadata"}, -1, "metadata server at http://127.0.0.1:1/metadata cannot be reached"),
        ({1: "http://127.0.0.1:1/metadata", 2: 0}, -1, "metadata server at http://127.0.0.1:1/metadata cannot be"),
        ({1: "gopher://127.0.0.1:1"}, -1, "P2PHANDSHAKE"),
        ({1: ""}, -1, "P2PHANDSHAKE"),
        ({7: "an engine"}, -1, "get_engine()"),
        ({2: 100}, -600, "global_segment_size"),
        ({4: "carrier-pigeon"}, -1, "protocol"),
        ({6: "127.0.0.1"}, -1, "host:port"),
        ({6: "127.0.0.1:1"}, -1, "cannot be reached (Connection refused); start mooncake_master"),
        ({0: "127.0.0.1:5555", 6: "127.0.0.1:1"}, -600, "cannot be reached"),
    ],
)
def test_what_is_refused(master, fresh, caplog, change, code, word):
    arguments = ["127.0.0.1", "P2PHANDSHAKE", MIB, MIB, "tcp", "", master.address]
    arguments.append(None)
    for at, value in change.items():
        arguments[at] = value
    start = time.monotonic()
    assert fresh.setup(*arguments) == code
    assert time.monotonic() - start < 2
    assert word in caplog.records[-1].message
    assert fresh.health_check() == 1
    assert not [pid for pid in children(os.getpid()) if "segment" in Path(f"/proc/{pid}/cmdline").read_text()]


def test_rdma_without_a_device_works_and_says_so(master, fresh, caplog):
    with caplog.at_level("INFO"):
        assert fresh.setup("127.0.0.1", "P2PHANDSHAKE", MIB, MIB, "rdma", "mlx5_0", master.address) == 0
    assert sum("RDMA" in record.message for record in caplog.records) == 1
    assert fresh.put("k", b"v") == 0


def test_names_and_ports(master, fresh, cleanup):
    assert fresh.get_hostname() == ""
    named = free_port()
    assert fresh.setup(f"127.0.0.1:{named}", "P2PHANDSHAKE", MIB, MIB, "tcp", "", master.address) == 0
    assert fresh.get_hostname() == f"127.0.0.1:{named}"  # only a name: not bound
    with socket.socket() as s:
        s.bind(("127.0.0.1", named))
    other = MooncakeDistributedStore()
    cleanup.callback(other.close)
    assert other.setup("127.0.0.1", "P2PHANDSHAKE", 0, MIB, "tcp", "", master.address) == 0
    host, port = other.get_hostname().split(":")
    assert host == "127.0.0.1"
    assert 12300 <= int(port) < 14300
    assert master.get("/get_all_segments").split() == [f"127.0.0.1:{named}"]


def test_setup_again(master, fresh):
    arguments = ("127.0.0.1", "P2PHANDSHAKE", MIB, MIB, "tcp", "", master.address)
    assert fresh.setup(*arguments) == 0
    fresh.put("k", b"v")
    assert fresh.setup(*arguments) == 0  # without close: the first segment is gone
    assert fresh.get("k") == b""
    assert len(master.get("/get_all_segments").split()) == 1
    fresh.close()
    assert fresh.setup(*arguments) == 0


def test_client_http_server(master, fresh):
    port = free_port()
    arguments = ("127.0.0.1", "P2PHANDSHAKE", MIB, MIB, "tcp", "", master.address)
    assert fresh.setup(*arguments, enable_client_http_server=True, client_http_port=port) == 0
    fresh.put("k", b"v" * 1000)
    with urlopen(f"http://127.0.0.1:{port}/health") as response:
        assert json.load(response) == {"status": "healthy", "code": 0}
    with urlopen(f"http://127.0.0.1:{port}/metrics") as response:
        assert 'mooncake_client_transferred_bytes_total{transport="local"} 1000' in response.read().decode()
    fresh.close()
    with pytest.raises(OSError):
        urlopen(f"http://127.0.0.1:{port}/health")


def test_other_threads_go_on_during_setup_and_large_puts(master, fresh):
    longest, stop = [0.0], threading.Event()

    def tick():
        last = time.perf_counter()
        while not stop.is_set():
            time.sleep(0.001)
            now = time.perf_counter()
            longest[0] = max(longest[0], now - last)
            last = now

    value = bytes(128 * MIB)
    import numpy  # noqa: F401 - its import is not what is looked at

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        assert fresh.setup("127.0.0.1", "P2PHANDSHAKE", 256 * MIB, 256 * MIB, "tcp", "", master.address) == 0
        assert fresh.put("k", value) == 0
        assert len(fresh.get("k")) == len(value)
    finally:
        stop.set()
        thread.join()
    assert longest[0] < 0.2  # a stall of the kind is the whole copy or the whole set-up; the machine is shared


def test_mooncake_client_by_hand(master, make_store, cleanup):
    argv = [BIN / "mooncake_client", "--host=127.0.0.1", "--port", "50077", f"--master_server_address={master.address}"]
    process = subprocess.Popen(
        [*argv, "--global_segment_size=32MB", "--metadata_server=P2PHANDSHAKE"], stderr=subprocess.PIPE, text=True
    )
    cleanup.callback(process.wait)
    cleanup.callback(process.kill)
    wait_until(lambda: "127.0.0.1:50077" in master.get("/get_all_segments"))
    first = make_store(segment=0)
    assert first.put("k", b"v" * 100_000) == 0
    assert first.transfer_stats() == {"local": 0, "shm": 100_000, "tcp": 0}
    first.close()
    assert make_store(segment=0).get("k") == b"v" * 100_000  # it outlives who put it
    process.send_signal(signal.SIGTERM)
    assert process.wait(5) == 0
    assert not master.get("/get_all_segments").split()


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--global_segment_size=0"], "global_segment_size"),
        (["--global_segment_size=lots"], "global_segment_size"),
        (["--enable_offload=true"], "SSD directory"),
        (["--nonsense=1"], "nonsense"),
        (["--master_server_address=127.0.0.1:1"], "127.0.0.1"),
        (["--metadata_server=http://127.0.0.1:1/metadata"], "metadata server at http://127.0.0.1:1/metadata cannot be"),
        (["--metadata_server=gopher://x"], "P2PHANDSHAKE"),
    ],
)
def test_mooncake_client_refuses(master, flags, word):
    argv = [
        BIN / "mooncake_client",
        "--host=127.0.0.1",
        f"--master_server_address={master.address}",
        "--global_segment_size=1MB",
    ]
    run = subprocess.run([*argv, *flags], capture_output=True, text=True, timeout=20, check=False)
    assert run.returncode in (1, 2)
    assert word in run.stderr
    assert "Traceback" not in run.stderr


def test_a_private_server_that_cannot_start_fails_setup(master, fresh, caplog, monkeypatch):
    monkeypatch.setenv("MC_MIN_RPC_PORT", "1")
    monkeypatch.setenv("MC_MAX_RPC_PORT", "1")
    assert fresh.setup("127.0.0.1", "P2PHANDSHAKE", MIB, MIB, "tcp", "", master.address) == -1
    assert "no free port" in caplog.records[-1].message
    monkeypatch.setenv("MC_MAX_RPC_PORT", "many")
    assert fresh.setup("127.0.0.1", "P2PHANDSHAKE", MIB, MIB, "tcp", "", master.address) == -1
    assert "MC_MAX_RPC_PORT" in caplog.records[-1].message


def test_path_sockets_leave_no_file(master, make_worker, tmp_path):
    worker = make_worker(MIB, env={"MC_SHM_SOCKET_DIR": str(tmp_path / "sockets")})
    other = make_worker(0)
    assert worker("result = store.put('k', b'v')") == 0
    assert len(list((tmp_path / "sockets").iterdir())) == 1
    assert other("result = [store.get('k').decode(), store.transfer_stats()['shm']]") == ["v", 1]
    (server,) = children(worker.pid)
    worker.close()
    wait_until(lambda: gone(server), 3)
    assert not list((tmp_path / "sockets").iterdir())


def test_more_memory_than_the_machine_has_is_refused(master, fresh, caplog):
    assert fresh.setup("127.0.0.1", "P2PHANDSHAKE", 1 << 50, MIB, "tcp", "", master.address) == -1
    assert "smaller global_segment_size" in caplog.records[-1].message
    assert fresh.setup("127.0.0.1", "P2PHANDSHAKE", MIB, MIB, "tcp", "", master.address) == 0
