"""Network interfaces, RDMA devices and GPUs of this host."""

import ctypes
import ctypes.util
import shutil
import socket
import subprocess
from pathlib import Path

from mooncake.doctor.findings import Finding, fail, ok, unknown, warn

NETWORK = "network"
GPUS = "GPUs"

_SLOW_MBIT = 10_000
_NVIDIA_SMI_LIMIT = 8.0  # seconds; the first call on a machine may load the driver
_LOOPBACK = 772  # ARPHRD_LOOPBACK
_UP = 0x1


def look_at_network(address: str, protocol: str) -> list[Finding]:
    """Interfaces that are up, the one that `address` (a pool's master) is reached by, and RDMA devices.

    `protocol`: the one that the pool's configuration names.
    """
    found = [finding for path in sorted(Path("/sys/class/net").iterdir()) if (finding := _interface(path))]
    if not any(finding.status == "ok" for finding in found):
        found.append(warn(NETWORK, "interfaces", "none but loopback is up: only this host can use a pool here"))
    return [*found, *_route(address), *_rdma(protocol)]


def _interface(path: Path) -> Finding | None:
    """None for loopback and for interfaces that are switched off."""
    if _number(path / "type") == _LOOPBACK or not _flags(path) & _UP:
        return None
    mtu = _number(path / "mtu")
    if _number(path / "carrier") == 0 or _text(path / "operstate") == "down":
        return warn(NETWORK, path.name, "is switched on but has no link", "Look at the cable or the virtual switch.")
    speed = _number(path / "speed")
    told = f"{speed / 1000:g} Gbit/s" if speed > 0 else "speed not told (a virtual interface)"
    text = f"{told}, MTU {mtu}"
    if 0 < speed < _SLOW_MBIT and (path / "device").exists():
        return warn(NETWORK, path.name, f"{text}: KV cache from other hosts will be slow", "Use a faster network.")
    if speed >= 10 * _SLOW_MBIT and mtu < 9000 and (path / "device").exists():
        return warn(NETWORK, path.name, text, f"Jumbo frames copy faster: ip link set {path.name} mtu 9000")
    return ok(NETWORK, path.name, text)


def _route(address: str) -> list[Finding]:
    """Which of our addresses the master sees us by."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        return []
    try:
        family, _, _, _, target = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing: asks the routing table
            own = probe.getsockname()[0]
    except OSError as error:
        return [unknown(NETWORK, "route", f"to {address}: {error.strerror or error}")]
    return [ok(NETWORK, "route", f"to {address} by this host's address {own}")]


def _rdma(protocol: str) -> list[Finding]:
    folder = Path("/sys/class/infiniband")
    devices = sorted(path for path in folder.iterdir()) if folder.is_dir() else []
    if not devices:
        text = "no device: the protocol rdma works over tcp here"
        return [warn(NETWORK, "RDMA", text) if protocol == "rdma" else ok(NETWORK, "RDMA", "no device; tcp needs none")]
    found = []
    for device in devices:
        for port in sorted((device / "ports").iterdir()):
            state, rate = _text(port / "state"), _text(port / "rate")
            report = ok if "ACTIVE" in state else warn
            found.append(
                report(NETWORK, f"RDMA {device.name}:{port.name}", f"{state}, {rate} (not used: bytes go by tcp)")
            )
    return found


# ------------------------------------------------------------ GPUs


def look_at_gpus() -> list[Finding]:
    command = shutil.which("nvidia-smi")
    devices = sorted(path.name for path in Path("/dev").glob("nvidia[0-9]*"))
    if command is None and not devices:
        return [ok(GPUS, "NVIDIA", "none here")]
    found = [_listed(command)] if command else [warn(GPUS, "nvidia-smi", "is not there, though there are devices")]
    found.append(_library("cuda", "libcuda.so.1", "the driver", "Start the container with --gpus all."))
    found.append(_library("cudart", "libcudart.so", "the CUDA runtime", ""))
    loaded = Path("/sys/module/nvidia_peermem").exists()
    if Path("/sys/class/infiniband").is_dir():
        text = "nvidia_peermem is loaded" if loaded else "nvidia_peermem is not loaded: RDMA cannot reach GPU memory"
        found.append(
            ok(GPUS, "peer memory", text) if loaded else warn(GPUS, "peer memory", text, "modprobe nvidia_peermem")
        )
    return found


def _listed(command: str) -> Finding:
    query = ["--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(
            [command, *query], capture_output=True, text=True, timeout=_NVIDIA_SMI_LIMIT, check=False
        )
    except subprocess.TimeoutExpired:
        return fail(GPUS, "nvidia-smi", f"did not end within {_NVIDIA_SMI_LIMIT:g} s", "The driver hangs: see dmesg.")
    lines = [line.strip() for line in answer.stdout.splitlines() if line.strip()]
    if answer.returncode or not lines:
        said = (answer.stdout + answer.stderr).strip().splitlines() or ["nothing"]
        return fail(GPUS, "nvidia-smi", f"failed: {said[0]}", "The driver does not work: see dmesg.")
    kinds = "; ".join(f"{lines.count(line)} x {line}" for line in dict.fromkeys(lines))
    return ok(GPUS, "nvidia-smi", f"{kinds} (name, memory, driver)")


def _library(short: str, name: str, what: str, advice: str) -> Finding:
    try:
        ctypes.CDLL(name)
    except OSError:
        found = ctypes.util.find_library(short)
        if found:
            return ok(GPUS, name, f"{what} is there as {found}")
        if not advice:
            return ok(GPUS, name, f"{what} is not on the library path (engines bring their own)")
        return fail(GPUS, name, f"{what} cannot be loaded", advice)
    return ok(GPUS, name, f"{what} can be loaded")


# ------------------------------------------------------------ files of sysfs


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _number(path: Path) -> int:
    """-1 when it is not told."""
    try:
        return int(_text(path))
    except ValueError:
        return -1


def _flags(path: Path) -> int:
    try:
        return int(_text(path / "flags"), 16)
    except ValueError:
        return 0
