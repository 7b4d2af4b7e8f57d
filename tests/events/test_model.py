"""Whatever happens to a directory, who follows its events knows exactly what is in it (tests/model has the rest)."""

from hypothesis import settings
from hypothesis.stateful import invariant

from mooncake.master.config import MasterConfig
from mooncake.master.counters import Counters
from mooncake.master.directory import Directory
from mooncake.master.kv_events import CLEARED, MEMORY, STORED, KvEvents
from mooncake.rpc.messages import Grant, SegmentInfo
from tests.model.test_directory import DirectoryMachine


class FollowedMachine(DirectoryMachine):
    def new_master(self) -> None:
        self.told: set[str] = set()
        super().new_master()
        self.events = self.directory.catalog.events = KvEvents(1 << 30, Counters())

    @invariant()
    def followed(self) -> None:
        for event in self.events.take(len(self.events)) if hasattr(self, "events") else ():
            if event.kind == CLEARED:
                self.told.clear()
                continue
            assert event.medium == MEMORY
            assert (event.key in self.told) == (event.kind != STORED), f"{event.kind} {event.key}"
            (self.told.add if event.kind == STORED else self.told.remove)(event.key)
        if hasattr(self, "events"):
            there = {obj.key for some in self.directory.catalog.objects.slices() for obj in some}
            assert self.told == there


FollowedMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, database=None)
TestFollowed = FollowedMachine.TestCase


class Follower:
    def __init__(self, directory: Directory) -> None:
        self.directory = directory
        self.events = directory.catalog.events = KvEvents(1 << 30, Counters())
        self.told: set[str] = set()
        self.kinds: list[str] = []

    def follow(self) -> None:
        for event in self.events.take(len(self.events)):
            self.kinds.append(event.kind)
            if event.kind == CLEARED:
                self.told.clear()
            else:
                (self.told.add if event.kind == STORED else self.told.remove)(event.key)
        assert self.told <= self.there()

    def there(self) -> set[str]:
        return {obj.key for some in self.directory.catalog.objects.slices() for obj in some}


def _run(steps, times: int = 1 << 30) -> None:
    for _ in range(times):
        try:
            next(steps)
        except StopIteration:
            return


def test_changes_while_everything_is_removed():
    directory = Directory(MasterConfig(), Counters(), clock=lambda: 1000.0)
    follower = Follower(directory)
    info = SegmentInfo(1, "h:1", 64 << 20, "", "", "h", "server")
    directory.mount(info, 0, 0, lambda _: None, 1000.0)
    client = directory.clients.arrive("c", "h")

    def put(key: str) -> None:
        grant = directory.granting.grant_one(client, key, 100, 1000.0, eager=False)
        assert isinstance(grant, Grant)
        assert directory.end_puts([grant.seq], {}, client, 1000.0) == [0]

    old = [f"old-{i}" for i in range(1500)]
    for key in old:
        put(key)
    directory.exist([*old[::50]], 1000.0)  # leased
    follower.follow()
    first = directory.remove_all(force=False)
    _run(first, 2)
    follower.follow()
    assert follower.told < follower.there()  # what it has not come to yet
    for i in range(700):
        put(f"new-{i}")
    assert directory.remove(["old-1499", "old-1450", "new-3"], True, 1000.0) == [0, 0, 0]
    second = directory.remove_all(force=False)
    _run(second, 3)
    follower.follow()
    _run(first)
    follower.follow()
    put("old-1499")
    _run(second)
    follower.follow()
    assert follower.told == follower.there()
    assert follower.there() >= set(old[::50]) - {"old-1450"}
    assert follower.kinds.count(CLEARED) == 1
    for _ in range(2):
        _run(directory.remove_all(force=False))
        follower.follow()
        assert follower.told == follower.there()
    _run(directory.remove_all(force=True))
    follower.follow()
    assert follower.told == follower.there() == set()
    assert follower.kinds.count(CLEARED) == 4
