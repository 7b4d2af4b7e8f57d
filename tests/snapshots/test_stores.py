"""Snapshots in S3 (a local server that speaks its protocol), the list in redis, the backup folder."""

import contextlib
import os
import subprocess
import sys
import time

import pytest

from mooncake.master.snapshots.settings import PATH_VARIABLE
from tests.engine.services import start_service
from tests.processes import free_port, wait_until
from tests.snapshots.masters import LOCAL, RESTORE, names, restart, take

MIB = 1 << 20
S3 = ("--enable_snapshot", "--snapshot_object_store_type=s3")
BUCKET = "pool"


@pytest.fixture
def bucket(monkeypatch, cleanup):
    """A bucket on a local server, named by the variables; botocore's client of it."""
    pytest.importorskip("moto", reason="pip install 'mooncake-py[dev]'")
    session = pytest.importorskip("botocore.session")
    port = free_port()
    server = subprocess.Popen(
        [sys.executable, "-c", f"from moto.server import main; main(['-p{port}'])"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    cleanup.callback(server.wait)
    cleanup.callback(server.kill)
    for name, value in {
        "S3_ENDPOINT": f"http://127.0.0.1:{port}", "ACCESS_KEY_ID": "key", "SECRET_ACCESS_KEY": "secret",
        "BUCKET_NAME": BUCKET, "USE_VIRTUAL_ADDRESSING": "false", "CONNECT_TIMEOUT_MS": "500",
    }.items():  # fmt: skip
        monkeypatch.setenv(f"MOONCAKE_AWS_{name}", value)
    client = session.get_session().create_client(
        "s3", region_name="us-east-1", endpoint_url=f"http://127.0.0.1:{port}",
        aws_access_key_id="key", aws_secret_access_key="secret",
    )  # fmt: skip

    def made() -> bool:
        with contextlib.suppress(Exception):
            client.create_bucket(Bucket=BUCKET)
            return True
        return False

    wait_until(made, 30, "the S3 server")
    return client, server


def objects(client) -> list[str]:
    found = client.list_objects_v2(Bucket=BUCKET).get("Contents", [])
    return sorted(one["Key"] for one in found)


@pytest.mark.slow
def test_s3(bucket, make_master, make_store, tmp_path):
    client, server = bucket
    log = tmp_path / "log"
    master = make_master(*S3, f"--snapshot_backup_dir={tmp_path / 'backup'}", log=log)
    store = make_store(MIB, at=master)
    assert store.put("k", b"v") == 0
    taken = [take(master) for _ in range(3)]
    prefix = "mooncake-snapshots/mooncake_cluster/"
    assert objects(client) == [prefix + name for name in taken[1:]]
    raw = client.get_object(Bucket=BUCKET, Key=prefix + taken[2])["Body"].read()
    client.put_object(Bucket=BUCKET, Key=prefix + taken[2], Body=raw[:-1] + b"?")
    restart(master, RESTORE)
    assert master.metric("mooncake_snapshots_damaged_total") == 1
    assert master.metric("mooncake_snapshot_restores_total") == 1
    assert f"began with snapshot {taken[1]}" in log.read_text()
    assert objects(client) == [prefix + taken[1], prefix + taken[2].replace(".snapshot", ".damaged")]

    server.kill()
    server.wait()
    for _ in range(2):
        assert f"it is in {tmp_path / 'backup'}" in take(master)
    wait_until(lambda: store.get("k") == b"v", 5)
    assert len(names(tmp_path / "backup" / "mooncake_cluster")) == 2
    assert master.metric("mooncake_snapshots_failed_total") == 2
    assert log.read_text().count("a snapshot could not be written") == 1
    began = time.monotonic()
    restart(master)
    assert time.monotonic() - began < 10
    newest = names(tmp_path / "backup" / "mooncake_cluster")[-1]
    assert f"began with snapshot {newest}" in log.read_text()
    assert master.metric("mooncake_snapshot_restore_failures_total") == 1


def test_the_list_in_redis(make_master, tmp_path, monkeypatch):
    redis = start_service("redis", tmp_path)
    try:
        monkeypatch.setenv(PATH_VARIABLE, str(tmp_path / "snapshots"))
        master = make_master(
            *LOCAL, "--snapshot_catalog_store_type=redis", f"--snapshot_catalog_store_connstring={redis.address}",
        )  # fmt: skip
        taken = [take(master) for _ in range(3)]
        folder = tmp_path / "snapshots" / "mooncake_cluster"
        assert names(folder) == taken[1:]
        os.rename(folder / taken[2], folder / "unknown.snapshot")  # what the list does not name is not used
        restart(master, RESTORE)
        assert master.metric("mooncake_snapshot_restores_total") == 1
    finally:
        redis.close()
    assert "redis at 127.0.0.1" in take(master)
    restart(master)  # without the list, what lies there
    assert master.metric("mooncake_snapshot_restores_total") == 1
