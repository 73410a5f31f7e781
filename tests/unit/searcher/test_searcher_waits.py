"""A searcher that waits for its trainer for an hour is alive all the time: probes must not kill it."""

import pytest
from support.memory_store import MemoryStore

from tba import telemetry
from tba.contracts.errors import StoreUnavailable
from tba.searcher.main import STEP_BUDGET_SECONDS, await_record
from tba.stop import StopFlag
from tba.store import AccessDenied

HOUR = 3600.0


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Patience(StopFlag):
    """A stop flag whose waits take no time but move the clock, asked to stop after an hour."""

    def __init__(self, clock: Clock, alive) -> None:
        super().__init__()
        self.clock, self.alive, self.dead = clock, alive, 0

    def is_set(self) -> bool:
        return self.clock.now >= HOUR

    def wait(self, seconds: float) -> bool:
        self.clock.now += seconds
        self.dead += not self.alive()[0]
        return self.is_set()


class Denying(MemoryStore):
    def get(self, key):
        raise AccessDenied("server answered 403 AccessDenied")


@pytest.mark.parametrize("store", [MemoryStore(), Denying()], ids=["nothing there", "denied without the right to list"])
def test_an_hour_without_a_trainer_is_no_reason_to_kill_a_searcher(store):
    clock = Clock()
    heartbeat = telemetry.Heartbeat(STEP_BUDGET_SECONDS, clock=clock)
    patience = Patience(clock, heartbeat.alive)
    assert await_record(store, patience, beat=heartbeat.beat) is None
    assert clock.now >= HOUR and patience.dead == 0


def test_storage_that_hangs_within_its_retries_is_no_reason_either():
    clock = Clock()
    heartbeat = telemetry.Heartbeat(STEP_BUDGET_SECONDS, clock=clock)

    class Slow(MemoryStore):
        def get(self, key):
            clock.now += 330.0  # a rotation sat out, or a retry budget
            assert heartbeat.alive()[0]
            return super().get(key)

    await_record(Slow(), Patience(clock, heartbeat.alive), beat=heartbeat.beat)


def test_storage_that_is_down_ends_the_process_to_be_started_again():
    class Down(MemoryStore):
        def get(self, key):
            raise StoreUnavailable("down")

    clock = Clock()
    with pytest.raises(StoreUnavailable):
        await_record(Down(), Patience(clock, lambda: (True, "")), beat=lambda: None)
