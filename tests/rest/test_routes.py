"""Every route of the REST service: what it answers when all is well, when there is nothing, and when it cannot be."""

import os
import signal

from mooncake.rpc.serving_messages import FILE_MARK
from tests.processes import wait_until

MIB = 1 << 20
JSON = "application/json"
OK = (200, JSON, {"status": "success"})
NOT_FOUND = (404, JSON, {"error": "Key not found"})


def wrong(text: str, status: int = 400):
    return (status, JSON, {"error": text})


def test_values(pool, make_store):
    service = pool.service
    assert service("PUT", "/api/put", {"key": "k", "value": "vä€😀"}) == OK
    stored = "vä€😀".encode()
    assert service("GET", "/api/get/k") == (200, "application/octet-stream", stored)
    assert make_store(segment=0, at=pool.master).get("k") == stored, "as any client sees it"
    assert service("GET", "/api/exist/k") == (200, JSON, {"exists": True})
    assert service("PUT", "/api/put", {"key": "k", "value": "other"}) == OK
    assert service("GET", "/api/get/k")[2] == stored, "what is there is kept"

    assert service("GET", "/api/get/none") == NOT_FOUND
    assert service("GET", "/api/exist/none") == (200, JSON, {"exists": False})
    assert service("DELETE", "/api/remove/none") == wrong("Remove operation failed", 500)
    assert service("DELETE", "/api/remove/k") == wrong("Remove operation failed", 500), "it is leased"

    for key, path in (("a/b c", "a%2Fb%20c"), ("a/b/c", "a/b/c"), ("ä?", "%C3%A4%3F")):
        assert service("PUT", "/api/put", {"key": key, "value": key}) == OK
        assert service("GET", f"/api/get/{path}")[2] == key.encode()


def test_removal(make_master, make_service):
    service = make_service(make_master("--default_kv_lease_ttl=100ms").address)
    for key in "abc":
        assert service("PUT", "/api/put", {"key": key, "value": key}) == OK
    assert service("DELETE", "/api/remove/a") == OK
    assert service("GET", "/api/get/a") == NOT_FOUND
    assert service("DELETE", "/api/remove_all") == (200, JSON, {"status": "success removed 2 keys"})
    assert service("DELETE", "/api/remove_all") == (200, JSON, {"status": "success removed 0 keys"})


def test_what_puts_refuse(pool):
    service = pool.service
    missing = wrong("Missing key or value")
    for body in ({}, {"key": "k"}, {"value": "v"}, {"key": "", "value": "v"}, {"key": "k", "value": None}):
        assert service("PUT", "/api/put", body) == missing
    failed = wrong("PUT operation failed", 500)
    assert service("PUT", "/api/put", {"key": "refused", "value": ""}) == failed
    assert service("PUT", "/api/put", {"key": "refused", "value": "v" * (65 * MIB)}) == failed, "more than the buffer"
    assert service("PUT", "/api/put", {"key": "k", "value": 5}) == wrong("value is 5; expected text")
    assert service("PUT", "/api/put", {"key": ["k"], "value": "v"}) == wrong('key is ["k"]; expected text')
    surrogates = wrong("value has halves of surrogate pairs, which UTF-8 cannot hold")
    assert service("PUT", "/api/put", raw=b'{"key": "k", "value": "\\ud800"}') == surrogates
    assert service("PUT", "/api/put", ["k"]) == wrong('The body must be a JSON object, but is ["k"]')
    for raw in (b"", b"{", b"\xff", b"[" * 100_000):
        status, kind, answer = service("PUT", "/api/put", raw=raw)
        assert (status, kind) == (400, JSON)
        assert answer["error"].startswith("The body must be JSON: ")
    assert service("PUT", "/api/put", raw=bytes(101 * MIB)) == wrong("the body is larger than 100 MB")
    assert service("GET", "/api/exist/refused") == (200, JSON, {"exists": False})


def test_other_paths_and_methods(pool):
    service = pool.service
    assert service("GET", "/api/nothing") == wrong("Not Found", 404)
    assert service("POST", "/api/put", {"key": "k", "value": "v"}) == wrong("Method Not Allowed", 405)
    assert service("GET", "/api/get/") == wrong("Not Found", 404)


def test_memory_that_comes_and_goes(pool):
    service = pool.bare_service
    assert service("PUT", "/api/put", {"key": "k", "value": "v"}) == wrong("PUT operation failed", 500), "no memory"
    status, _, mounted = service("POST", "/api/mount", {"size": 17 * MIB, "protocol": "tcp", "location": "cpu:0"})
    assert (status, mounted["status"], mounted["allocated_size"]) == (200, "success", 32 * MIB)
    (segment,) = mounted["segment_ids"]
    assert set(mounted) == {"status", "segment_ids", "allocated_size"}
    assert service("PUT", "/api/put", {"key": "k", "value": "v"}) == OK
    assert service("POST", "/api/unmount", {"segment_ids": [segment], "grace_period_seconds": 0}) == OK
    wait_until(lambda: service("GET", "/api/get/k") == NOT_FOUND, what="the end of what was there")
    assert service("POST", "/api/unmount", {"segment_ids": segment}) == wrong("Unmount and free failed, ret=-1", 500)

    for size in (0, -1, 1.5, "1", True, None, 1 << 64):
        assert service("POST", "/api/mount", {"size": size}) == wrong("Invalid size, must be a positive integer")
    assert service("POST", "/api/mount", {"size": 1 << 45}) == wrong("Allocate and mount failed, ret=-1", 500)
    for body in ({}, {"segment_ids": []}, {"segment_ids": ""}):
        assert service("POST", "/api/unmount", body) == wrong("Missing segment_ids")
    assert service("POST", "/api/unmount", {"segment_ids": 5}) == wrong("segment_ids is 5; expected a list of texts")
    status, _, answer = service("POST", "/api/unmount", {"segment_ids": ["1-2"], "grace_period_seconds": -1})
    assert (status, "grace_period_seconds is -1" in answer["error"]) == (400, True)


def test_shared_memory(pool, shared_memory):
    service, master = pool.bare_service, pool.bare_master
    body = {"name": shared_memory, "size": 32 * MIB, "offset": 4096, "protocol": "tcp", "location": ""}
    status, _, mounted = service("POST", "/api/mount_shm", body)
    assert (status, mounted) == (200, {"status": "success", "segment_ids": mounted["segment_ids"]})
    assert master.metric("master_total_capacity_bytes") == 32 * MIB - FILE_MARK
    assert service("PUT", "/api/put", {"key": "k", "value": "v" * MIB}) == OK
    assert service("GET", "/api/get/k")[2] == b"v" * MIB
    with open(f"/dev/shm/{shared_memory}", "rb") as f:
        assert b"v" * MIB in f.read()
    both = [mounted["segment_ids"][0], "1-2"]
    failed = {"error": "Unmount failed for one or more segments", "failed_segment_ids": ["1-2"]}
    assert service("POST", "/api/unmount_shm", {"segment_ids": both}) == (500, JSON, failed)
    assert master.metric("master_total_capacity_bytes") == 0
    assert service("POST", "/api/unmount_shm", {}) == wrong("Missing segment_ids")

    unnamed = wrong("Missing or invalid name or size")
    for name in ("", "/", ".", "..", "a/b", "../etc/passwd", 5, None, "a\0b"):
        assert service("POST", "/api/mount_shm", {"name": name, "size": MIB}) == unnamed
    assert service("POST", "/api/mount_shm", {"name": shared_memory}) == unnamed
    assert service("POST", "/api/mount_shm", {"name": "no-such", "size": MIB}) == wrong("Mount failed, ret=-600", 500)
    too_much = {"name": "/" + shared_memory, "size": 65 * MIB}
    assert service("POST", "/api/mount_shm", too_much) == wrong("Mount failed, ret=-600", 500)
    status, _, answer = service("POST", "/api/mount_shm", {"name": shared_memory, "size": "1"})
    assert (status, answer["error"]) == (400, 'size is "1"; expected a whole number')


def test_values_stay_readable_through_a_grace_period(pool, shared_memory):
    service, master = pool.bare_service, pool.bare_master
    mounted = service("POST", "/api/mount_shm", {"name": shared_memory, "size": 16 * MIB})[2]
    assert service("PUT", "/api/put", {"key": "k", "value": "v"}) == OK
    leaving = {"segment_ids": mounted["segment_ids"], "grace_period_seconds": 2}
    assert service("POST", "/api/unmount_shm", leaving) == OK
    assert service("GET", "/api/get/k")[2] == b"v"
    assert service("PUT", "/api/put", {"key": "new", "value": "v"}) == wrong("PUT operation failed", 500)
    wait_until(lambda: service("GET", "/api/get/k") == NOT_FOUND, what="the end of the grace period")
    assert not master.get("/get_all_segments").split()


def test_modes(pool, shared_memory):
    service, master = pool.bare_service, pool.bare_master
    path = f"/dev/shm/{shared_memory}"

    def capacity() -> int:
        return round(master.metric("master_total_capacity_bytes") / MIB)

    decode = {"mode": "decode", "path": path, "size": 16 * MIB}
    status, _, first = service("POST", "/api/reconfigure", decode)
    assert (status, first) == (200, {"status": "success", "mode": "decode", "segment_ids": first["segment_ids"]})
    assert capacity() == 16
    second = service("POST", "/api/reconfigure", {**decode, "mode": "DECODE", "size": 32 * MIB, "offset": 4096})[2]
    assert len(second["segment_ids"]) == 1
    assert second["segment_ids"] != first["segment_ids"]
    assert capacity() == 32
    kept = {"error": "Mount failed, ret=-600; keeping previous decode segments", "mode": "decode"}
    assert service("POST", "/api/reconfigure", {**decode, "path": "/dev/shm/no-such"}) == (500, JSON, kept)
    assert capacity() == 32
    gone = {"error": "Mount failed, ret=-600; rolled back to prefill", "mode": "prefill"}
    assert service("POST", "/api/reconfigure", {**decode, "size": 1 << 40}) == (500, JSON, gone)
    assert capacity() == 0
    prefill = (200, JSON, {"status": "success", "mode": "prefill"})
    assert service("POST", "/api/reconfigure", decode)[0] == 200
    assert service("POST", "/api/reconfigure", {"mode": "prefill"}) == prefill
    assert capacity() == 0
    assert service("POST", "/api/reconfigure", {"mode": "prefill"}) == prefill

    assert service("POST", "/api/reconfigure", {}) == wrong("Invalid mode. Use 'decode' or 'prefill'")
    assert service("POST", "/api/reconfigure", {"mode": 5}) == wrong("mode is 5; expected text")
    missing = wrong("Missing path or size for decode mode")
    assert service("POST", "/api/reconfigure", {"mode": "decode", "path": path}) == missing
    assert service("POST", "/api/reconfigure", {"mode": "decode", "size": 1}) == missing


def test_only_files_that_may_be_overwritten(pool, tmp_path):
    service, allowed, other = pool.bare_service, pool.directory, tmp_path
    for directory in (allowed, other):
        (directory / "file").write_bytes(b"\1" * 16 * MIB)
    (allowed / "link").symlink_to(other / "file")
    decode = {"mode": "decode", "size": 16 * MIB}
    around = f"{allowed}/{os.path.relpath(other, allowed)}/file"
    for path in (other / "file", allowed / "link", around, allowed, "/etc/passwd", "file", "\0"):
        status, kind, answer = service("POST", "/api/reconfigure", {**decode, "path": str(path)})
        assert (status, kind) == (400, JSON)
        assert f"is not a file in /dev/shm or {allowed}; the service's --segment-dir" in answer["error"]
    assert service("POST", "/api/reconfigure", {**decode, "path": str(allowed / "file")})[0] == 200
    assert service("PUT", "/api/put", {"key": "k", "value": "v"}) == OK
    assert (other / "file").read_bytes() == b"\1" * 16 * MIB
    assert service("POST", "/api/reconfigure", {"mode": "prefill"})[0] == 200


def test_local_disk(make_master, make_service, tmp_path):
    master = make_master("--enable_offload")
    service = make_service(master.address, enable_ssd_offload=True, ssd_offload_path=str(tmp_path))
    wait_until(lambda: master.metric("mooncake_disk_tiers") == 1, what="the tier")
    assert service("POST", "/api/unmount_local_disk", {"grace_period_seconds": 0}) == OK
    assert master.metric("mooncake_disk_tiers") == 0
    assert service("POST", "/api/unmount_local_disk", {}) == OK, "again, and without the number"
    for grace in (-1, 3601, "5", 1.5, True):
        status, kind, answer = service("POST", "/api/unmount_local_disk", {"grace_period_seconds": grace})
        assert (status, kind) == (400, JSON)
        assert answer["error"].startswith("grace_period_seconds is ")
    assert service("POST", "/api/unmount_local_disk")[0] == 400


def test_a_master_that_is_gone(master, service):
    assert service("PUT", "/api/put", {"key": "k", "value": "v"}) == OK
    master.kill()
    assert service("GET", "/api/get/k") == wrong("Exist check failed", 500)
    assert service("GET", "/api/exist/k") == wrong("Exist check failed", 500)
    assert service("DELETE", "/api/remove_all") == wrong("RemoveAll operation failed", 500)
    assert service("PUT", "/api/put", {"key": "l", "value": "v"}) == wrong("PUT operation failed", 500)


def test_the_end(master, service):
    assert len(master.get("/get_all_segments").split()) == 1
    assert service.stop(signal.SIGINT) == 0
    assert not master.get("/get_all_segments").split()
    assert not os.path.exists(f"/proc/{service.process.pid}")
