"""Whatever happens to a directory, who follows its events knows exactly what is in it (tests/model has the rest)."""

from hypothesis import settings
from hypothesis.stateful import invariant

from mooncake.master.counters import Counters
from mooncake.master.kv_events import CLEARED, MEMORY, STORED, KvEvents
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
