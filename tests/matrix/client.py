"""A writer or reader of the matrix: does the work that it is told, notes every call, and checks every byte it reads.

    python -m tests.matrix.client FOLDER NAME

Reads JSON objects from stdin: first what to set up with, then one for each piece of work; answers each with a line.
"""

import contextlib
import ctypes
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from mooncake.store import MooncakeDistributedStore
from tests.invariants.history import Notes
from tests.invariants.values import SMALLEST, value, version_of
from tests.invariants.watch import Watch

KIB, MIB = 1 << 10, 1 << 20
KEYS = 60
LARGEST = 2 * MIB
BATCH = 6
CONTROL, DATA = 3.0, 9.0  # seconds: what a call of either kind may take; docs/architecture.md has the single limits
LONGEST_STOP = 8.0  # seconds

SIZES = {
    "put": (200, 5 * KIB, 70 * KIB, 300 * KIB, 900 * KIB),
    "get": (200, 70 * KIB, 300 * KIB),
    "batch": (4 * KIB, 64 * KIB, 200 * KIB),
    "eviction": (300 * KIB, MIB, LARGEST),
    "offload": (70 * KIB, 300 * KIB, MIB),
    "task": (5 * KIB, 300 * KIB, MIB),
}
CALLS = {  # what a writer and a reader do in each kind of work, and how often
    ("put", "writer"): {"put": 4, "put_parts": 2, "put_from": 2, "upsert": 3, "remove": 2, "get": 1},
    ("put", "reader"): {"get": 4, "exist": 2, "get_into": 2},
    ("get", "writer"): {"upsert": 2, "put": 2, "remove": 1, "get": 1},
    ("get", "reader"): {"get": 4, "get_into": 4, "get_buffer": 2, "get_batch": 2, "exist": 1},
    ("batch", "writer"): {"put_batch": 4, "upsert_batch": 2, "remove_batch": 1, "get_batch": 1},
    ("batch", "reader"): {"get_batch": 3, "batch_get_into": 3, "exist_batch": 1},
    ("eviction", "writer"): {"put": 6, "put_from": 2, "upsert": 1, "get": 1},
    ("eviction", "reader"): {"get": 3, "get_into": 3, "exist": 1},
    ("offload", "writer"): {"put": 6, "put_batch": 2, "upsert": 1, "remove": 1, "get": 2},
    ("offload", "reader"): {"get": 3, "get_into": 3, "get_batch": 2},
    ("task", "writer"): {"copy": 3, "move": 3, "put": 3, "upsert": 1, "remove": 1},
    ("task", "reader"): {"get": 3, "get_into": 2, "exist": 1},
}


class Client:
    def __init__(self, folder: Path, name: str, number: int, settings: dict[str, Any]) -> None:
        self.notes = Notes(folder / f"{name}.notes")
        self.watch = Watch(str(folder / f"{name}.stacks"), LONGEST_STOP)
        self.store = MooncakeDistributedStore()
        self.room = np.zeros(BATCH * LARGEST, np.uint8)
        self.base = self.room.ctypes.data
        self.version = number * 1_000_000
        self.rng = random.Random(number)
        self.sizes: tuple[int, ...] = ()
        self.seconds_a_byte = 0.0
        while self.store.setup(settings["host"], settings["metadata"], 0, 64 * MIB, "tcp", "", settings["master"]):
            time.sleep(0.2)
        if settings["registered"]:
            self.store.register_buffer(self.base, self.room.nbytes)
        self.segments: list[str] = []

    def work(self, kind: str, role: str, seed: int, seconds: float, segments: list[str], seconds_a_byte: float) -> int:
        """The number of calls that it made."""
        self.rng, self.sizes, self.segments = random.Random(seed), SIZES[kind], segments
        self.seconds_a_byte = seconds_a_byte
        calls = CALLS[kind, role]
        names, weights = list(calls), list(calls.values())
        end = time.monotonic() + seconds
        count = 0
        while time.monotonic() < end:
            (name,) = self.rng.choices(names, weights)
            getattr(self, name)()
            count += 1
        return count

    # -- what it draws

    def key(self) -> str:
        return f"k{self.rng.randrange(KEYS)}"

    def some_keys(self) -> list[str]:
        return [f"k{i}" for i in self.rng.sample(range(KEYS), BATCH)]

    def made(self, key: str) -> bytes:
        self.version += 1
        return value(key, self.version, int(SMALLEST + self.rng.uniform(0.5, 1) * self.rng.choice(self.sizes)))

    # -- one call, noted and watched

    def _do(self, name: str, limit: float, call: Callable[[], Any], moved: int = 0, **about: Any) -> dict[str, Any]:
        with self.notes.call(name, **about) as result:
            with self.watch.call(name, limit + moved * self.seconds_a_byte):
                result["got"] = call()
            got = result.pop("got")
            return self._note(result, got, about)

    def _note(self, result: dict[str, Any], got: Any, about: dict[str, Any]) -> dict[str, Any]:
        keys = list(about.get("wrote") or about.get("removed") or about.get("keys") or ())
        if isinstance(got, dict):  # of a get: {key: bytes, or a code}
            result["saw"], result["wrong"], result["codes"] = {}, [], {}
            for key, what in got.items():
                result["codes"][key] = 0 if isinstance(what, bytes) else what
                if isinstance(what, bytes):
                    version, why = version_of(key, what)
                    if why:
                        result["wrong"].append(f"{key}: {why}")
                    else:
                        result["saw"][key] = version
        else:
            codes = got if isinstance(got, list) else [got] * len(keys)
            result["codes"] = dict(zip(keys, codes, strict=True))
        return result

    def _write(self, name: str, values: dict[str, bytes], call: Callable[[], Any], replaces: bool = False) -> None:
        wrote = {key: int.from_bytes(data[8:16], "little") for key, data in values.items()}
        self._do(name, DATA, call, sum(map(len, values.values())), wrote=wrote, replaces=replaces)

    def _read(self, name: str, keys: list[str], call: Callable[[], dict[str, Any]]) -> None:
        self._do(name, DATA, call, LARGEST * len(keys))

    # -- calls that write

    def put(self) -> None:
        key = self.key()
        data = self.made(key)
        self._write("put", {key: data}, lambda: self.store.put(key, data))

    def put_parts(self) -> None:
        key = self.key()
        data = self.made(key)
        cut = self.rng.randrange(len(data))
        self._write("put_parts", {key: data}, lambda: self.store.put_parts(key, data[:cut], data[cut:]))

    def put_from(self) -> None:
        key = self.key()
        data = self.made(key)
        ctypes.memmove(self.base, data, len(data))
        self._write("put_from", {key: data}, lambda: self.store.put_from(key, self.base, len(data)))

    def upsert(self) -> None:
        key = self.key()
        data = self.made(key)
        self._write("upsert", {key: data}, lambda: self.store.upsert(key, data), replaces=True)

    def put_batch(self) -> None:
        values = {key: self.made(key) for key in self.some_keys()}
        self._write("put_batch", values, lambda: self.store.put_batch(list(values), list(values.values())))

    def upsert_batch(self) -> None:
        values = {key: self.made(key) for key in self.some_keys()}
        self._write("upsert_batch", values, lambda: self.store.upsert_batch(list(values), list(values.values())),
                    replaces=True)  # fmt: skip

    def remove(self) -> None:
        key, force = self.key(), self.rng.random() < 0.8
        self._do("remove", CONTROL, lambda: self.store.remove(key, force=force), removed=[key])

    def remove_batch(self) -> None:
        keys = self.some_keys()
        self._do("remove_batch", CONTROL, lambda: self.store.batch_remove(keys, force=True), removed=keys)

    # -- calls that read

    def get(self) -> None:
        key = self.key()
        self._read("get", [key], lambda: {key: self.store.get(key) or -704})

    def get_buffer(self) -> None:
        key = self.key()

        def call() -> dict[str, Any]:
            handle = self.store.get_buffer(key)
            return {key: -704 if handle is None else bytes(handle[:])}

        self._read("get_buffer", [key], call)

    def get_into(self) -> None:
        key = self.key()
        self.room[:LARGEST] = 0

        def call() -> dict[str, Any]:
            size = self.store.get_into(key, self.base, LARGEST)
            return {key: ctypes.string_at(self.base, size) if size > 0 else size}

        self._read("get_into", [key], call)

    def get_batch(self) -> None:
        keys = self.some_keys()
        self._read(
            "get_batch", keys, lambda: {k: v or -704 for k, v in zip(keys, self.store.get_batch(keys), strict=True)}
        )

    def batch_get_into(self) -> None:
        keys = self.some_keys()
        places = [self.base + i * LARGEST for i in range(BATCH)]
        self.room[:] = 0

        def call() -> dict[str, Any]:
            sizes = self.store.batch_get_into(keys, places, [LARGEST] * BATCH)
            return {
                key: ctypes.string_at(place, size) if size > 0 else size
                for key, place, size in zip(keys, places, sizes, strict=True)
            }

        self._read("batch_get_into", keys, call)

    def exist(self) -> None:
        key = self.key()
        self._do("exist", CONTROL, lambda: self.store.is_exist(key), keys=[key])

    def exist_batch(self) -> None:
        keys = self.some_keys()
        self._do("exist_batch", CONTROL, lambda: self.store.batch_is_exist(keys), keys=keys)

    # -- tasks

    def copy(self) -> None:
        key, targets = self.key(), [self.rng.choice(self.segments)]
        self._task("copy", key, lambda: self.store.create_copy_task(key, targets))

    def move(self) -> None:
        key, ends = self.key(), self.rng.sample(self.segments, 2)
        self._task("move", key, lambda: self.store.create_move_task(key, *ends))

    def _task(self, name: str, key: str, create: Callable[[], tuple[Any, int]]) -> None:
        created: list[Any] = []

        def call() -> int:
            task, code = create()
            created.append(task)
            return code

        if self._do(name, CONTROL, call, keys=[key])["codes"][key] == 0 and self.rng.random() < 0.7:
            self._do("query", CONTROL, lambda: self.store.query_task(created[0])[1], keys=[key])


def main() -> None:
    folder, name = Path(sys.argv[1]), sys.argv[2]
    settings = json.loads(sys.stdin.readline())
    client = Client(folder, name, settings["number"], settings)
    print(json.dumps("ready"), flush=True)
    with contextlib.closing(client.store):
        for line in sys.stdin:
            count = client.work(**json.loads(line))
            print(json.dumps({"calls": count, "late": client.watch.late}), flush=True)
            client.watch.late.clear()


if __name__ == "__main__":
    main()
