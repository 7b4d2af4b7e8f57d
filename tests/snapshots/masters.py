"""Masters with snapshots, for tests."""

import json
import urllib.error
import urllib.request
from pathlib import Path

from tests.processes import Master, wait_until

LOCAL = ("--enable_snapshot", "--snapshot_object_store_type=local")
RESTORE = "--enable_snapshot_restore"


def take(master: Master) -> str:
    """Have a snapshot written now; its name, or why not."""
    master.get("/health")
    request = urllib.request.Request(
        f"http://{master.host}:{master.metrics_port}/api/v1/snapshots", data=b"", method="POST"
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return json.load(response)["snapshot"]
    except urllib.error.HTTPError as error:
        return json.load(error)["error_message"]


def restart(master: Master, *flags: str) -> None:
    """Killed, and started again with further flags."""
    master.kill()
    master._flags = (*master._flags, *flags)
    master.start()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def wait_for_log(path: Path, text: str) -> None:
    wait_until(lambda: text in path.read_text(), 10, f"{text!r} in the log")
