"""What the doctor says of this host: each thing looked at once, by itself, and within its time."""

import os
import socket
import time

from mooncake.bench.machine import visible_gpus
from mooncake.doctor import copies, devices, memory, ports, processes
from mooncake.doctor.checks import Check, run_all
from mooncake.doctor.findings import Status, exit_code, ok
from tests.processes import Worker, stop


def test_a_check_that_hangs_or_fails_spoils_no_other():
    def hang():
        time.sleep(60)

    def fail():
        raise ValueError("this kernel is odd")

    start = time.monotonic()
    found = run_all(
        [
            Check("area", "one", lambda: [ok("area", "one", "fine")], 5),
            Check("area", "two", hang, 0.2),
            Check("area", "three", fail, 5),
        ]
    )
    assert time.monotonic() - start < 4
    assert [(one.status, one.text) for one in found] == [
        (Status.OK, "fine"),
        (Status.UNKNOWN, "not checked: it took longer than 0.2 s"),
        (Status.UNKNOWN, "not checked: ValueError: this kernel is odd"),
    ]
    assert exit_code(found) == 0


def test_the_whole_host(doctor):
    start = time.monotonic()
    report = doctor()
    assert time.monotonic() - start < 20
    looked_at = {finding["area"] for finding in report.findings}
    assert looked_at == {"software", "memory", "copies between processes", "network", "GPUs", "ports of this host"}
    assert all(finding["text"] for finding in report.findings)
    assert report.one("mooncake-py", "ok")


def test_memory_is_that_of_the_kernel():
    subjects = [finding.subject for finding in memory.look_at_memory(0)]
    assert subjects == ["memory", "cgroup limit", "memfd", "/dev/shm", "memlock", "huge pages"]


def test_copies_are_really_tried(monkeypatch):
    assert copies._try("permit") in range(200)
    (found,) = copies.look_at_copies()
    assert found.status in (Status.OK, Status.WARN)
    for errno, reason in ((1, "is refused (EPERM, "), (38, "is refused by a seccomp filter (ENOSYS)")):
        monkeypatch.setattr(copies, "_try", lambda how, errno=errno: errno)
        (found,) = copies.look_at_copies()
        assert (found.status, reason in found.text) == (Status.WARN, True)


def test_network_and_gpus_do_not_fail():
    assert all(finding.status is not Status.FAIL for finding in devices.look_at_network("127.0.0.1:50051", "rdma"))
    assert devices.look_at_gpus()


def test_who_has_a_port(cleanup):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        found = ports.look_at_ports([(port, "asked for")])[0]
        assert found.text.startswith(f"taken by pid {os.getpid()} (")
        assert processes.listeners(port) == [os.getpid()]
        assert port in processes.listening_ports(os.getpid())
    assert ports.look_at_ports([(port, "asked for")])[0].text == "free"

    worker = Worker()
    cleanup.callback(worker.close)
    port = worker("import socket; server = socket.create_server(('127.0.0.1', 0)); result = server.getsockname()[1]")
    stop(worker.pid)
    found = ports.look_at_ports([(port, "asked for")])[0]
    assert (found.status, found.advice) == (Status.WARN, f"kill -CONT {worker.pid} lets it go on.")


def test_processes(monkeypatch, cleanup):
    worker = Worker(env={"SOME_VARIABLE": "some value"})
    cleanup.callback(worker.close)
    found = processes.process(worker.pid)
    assert found.environment["SOME_VARIABLE"] == "some value"
    assert found.parent == os.getpid()
    assert worker.pid in processes.descendants(os.getpid())
    assert processes.process(2**22 + 1) is None
    assert processes.is_local("127.0.0.1")
    assert not processes.is_local("192.0.2.1")


def fake_nvidia_smi(folder, monkeypatch, script: str) -> None:
    """This machine has no GPU."""
    command = folder / "nvidia-smi"
    command.write_text(f"#!/bin/sh\n{script}\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_gpus_that_are_listed(tmp_path, monkeypatch):
    listing = "case $1 in *index*) printf '0\\n1\\n';; *) printf 'NVIDIA H200, 143771 MiB, 580.1\\n%.0s' 1 2;; esac"
    fake_nvidia_smi(tmp_path, monkeypatch, listing)
    found = {finding.subject: finding for finding in devices.look_at_gpus()}
    assert found["nvidia-smi"].text == "2 x NVIDIA H200, 143771 MiB, 580.1 (name, memory, driver)"
    assert found["libcuda.so.1"].status is Status.FAIL, "there is no driver here"
    assert visible_gpus() == ("0", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-abc, 3")
    assert visible_gpus() == ("GPU-abc", "3")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert visible_gpus() == ()


def test_a_driver_that_does_not_work(tmp_path, monkeypatch):
    fake_nvidia_smi(tmp_path, monkeypatch, "echo 'NVIDIA-SMI has failed'; exit 9")
    found = {finding.subject: finding for finding in devices.look_at_gpus()}
    assert found["nvidia-smi"].status is Status.FAIL
    assert found["nvidia-smi"].text == "failed: NVIDIA-SMI has failed"
    assert visible_gpus() == ()
