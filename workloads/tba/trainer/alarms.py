"""What a trainer sees going wrong, as the alerts of `/progress`: each becomes a condition of the job.

A message stays the same as long as the trouble does: it names when that began, not how long ago.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tba.contracts.config import Reward
from tba.contracts.history import Alert
from tba.store.retry import Weather
from tba.trainer.outage import Outage

STORAGE_SECONDS = 15.0
"""Shorter troubles are no news."""
LEAST_SIGNAL = 0.05
"""Share of groups with differing rewards, or step-0 pass@K, below which there is nothing to learn from."""
SIGNAL_STEPS = 20
"""Batches after which the share of groups is judged."""


def reward_label(reward: Reward) -> str:
    """The reward as its job names it."""
    reference = reward.config_map_ref
    return reward.name or reward.entrypoint or (f"{reference.name}/{reference.key}" if reference else "")


@dataclass(slots=True)
class Alarms:
    """Facts that the loop keeps up to date; `alerts` may be asked by any thread."""

    weather: Weather = field(default_factory=Weather)
    outages: Callable[[], Sequence[Outage]] = tuple
    """What is sat out elsewhere: denied access is no weather."""
    reward: str = ""
    stall_timeout_seconds: float = float("inf")
    data_since: float | None = None
    """Unix seconds at which rows last came, or were first awaited; None: none are awaited."""
    first_pass_at_k: float | None = None
    """Of the evaluation of version 0, if it has several samples a prompt."""
    signal_fraction: float | None = None
    """Groups with differing rewards, of all groups trained on; None before `SIGNAL_STEPS` batches."""

    def learned(self, signal_groups: int, groups: int, groups_per_batch: int) -> None:
        """Counts over the whole run so far."""
        self.signal_fraction = signal_groups / groups if groups >= SIGNAL_STEPS * groups_per_batch else None

    def alerts(self, now: float) -> list[Alert]:
        """Everything wrong at `now` (unix seconds)."""
        found = (self._storage(now), self._sync(now), self._signal())
        return [alert for alert in found if alert is not None]

    def storage_trouble(self, now: float) -> str:
        """What storage has done for longer than a moment, with its error; empty if it serves us."""
        troubles = [t for t in (self.weather.trouble, *(o.trouble for o in self.outages())) if t is not None]
        since = min((t.since for t in troubles), default=now)
        if now - since <= STORAGE_SECONDS:
            return ""
        return f"storage has not served this trainer since {clock_time(since)}: {troubles[0].error}"

    def _storage(self, now: float) -> Alert | None:
        trouble = self.storage_trouble(now)
        if not trouble:
            return None
        remedy = "the run goes on by itself when it does: check that the store is up and reachable, and its credentials"
        return Alert(reason="StorageUnreachable", message=f"{trouble}; {remedy}")

    def _sync(self, now: float) -> Alert | None:
        since = self.data_since
        if since is None or now - since <= self.stall_timeout_seconds:
            return None
        return Alert(
            reason="SyncStalled",
            message=f"no trajectories have come since {clock_time(since)}, for longer than sync.stallTimeoutSeconds "
            f"({self.stall_timeout_seconds:g}): check that searchers run and what they say they wait for",
        )

    def _signal(self) -> Alert | None:
        if self.signal_fraction is not None:
            weak, got = self.signal_fraction < LEAST_SIGNAL, "groups of responses whose rewards differ are"
        else:
            pass_at_k = self.first_pass_at_k
            weak, got = pass_at_k is not None and pass_at_k < LEAST_SIGNAL, "pass@K before the first step is"
        if not weak:
            return None
        return Alert(
            reason="NoRewardSignal",
            message=f"reward {self.reward}: {got} below {LEAST_SIGNAL:.0%}, so there is next to nothing to learn from: "
            "read the samples in `tba report`; do prompt, answer and the form that the reward expects fit, is "
            "task.sampling.maxTokens enough? Else take an easier task or a stronger model",
        )


def clock_time(seconds: float) -> str:
    """Unix seconds for people, in UTC."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
