"""A run with mode Managed in miniature: a trainer and searcher pods that start slowly, sampled and scaled as for real.

Time goes in ticks of one sample. The averages are the trainer's own (tba.trainer.rates), with noise on top.
"""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from tba.contracts.history import Progress
from tba.contracts.job import Autoscaling
from tba.trainer.rates import Rates
from tba_operator.api import Job, JobStatus, SearcherStatus, parse_job
from tba_operator.scaling import decide
from tba_operator.world import ProgressSample, ScalingMemory

TICK_SECONDS = 10.0
HEARD_SECONDS = 60.0
PROMPTS, RESPONSES = 8, 16
ROWS = PROMPTS * RESPONSES
START = 1_000_000.0


@dataclass(frozen=True, slots=True)
class Load:
    """What there is to do at a moment."""

    steps: float
    """Optimizer steps per busy second."""
    rate: float
    """Rows a second of one searcher."""
    storage: bool = True

    def needed(self, policy: Autoscaling) -> float:
        """The number of searchers that is exactly right, not rounded, within the bounds."""
        exact = self.steps * ROWS / policy.target_replay_ratio / self.rate
        return max(policy.min_replicas, min(exact, policy.max_replicas or exact))


@dataclass(slots=True)
class Pod:
    """A searcher pod: `delivers_at` is when its first rows arrive."""

    created: float
    delivers_at: float
    gone_at: float | None = None
    spooled: float = 0.0


def autoscaling(**changes) -> Autoscaling:
    return Autoscaling(**{"mode": "Managed", "min_replicas": 1, "max_replicas": 64, **changes})


def job(*, replicas: int = 1, desired: int = 0, policy: Autoscaling | None = None) -> Job:
    return parse_job(
        {
            "apiVersion": "tba.dev/v1alpha1",
            "kind": "TBAJob",
            "metadata": {"name": "run", "namespace": "ns", "uid": "u"},
            "spec": {
                "model": {"uri": "hf://org/model"},
                "task": {"prompts": {"uri": "s3://b/p.jsonl"}, "reward": {"name": "fake"}},
                "objective": {"promptsPerBatch": PROMPTS, "responsesPerPrompt": RESPONSES},
                "storage": {"uri": "s3://b/run"},
                "searcher": {"replicas": replicas, "autoscaling": (policy or autoscaling()).model_dump(mode="json")},
            },
            "status": {"searcher": {"desiredReplicas": desired}},
        }
    )


def sample(
    at: float,
    *,
    steps: float | None = None,
    rate: float | None = None,
    searchers: int = 0,
    state: str = "Training",
) -> ProgressSample:
    progress = Progress.model_validate(
        {
            "run_id": "r",
            "state": state,
            "epoch": 1,
            "step": 1,
            "total_steps": 1000,
            "percentage": 0.1,
            "policy_version": 1,
            "reward": None,
            "eval_score": None,
            "staleness_mean": None,
            "trainer_idle_percent": None,
            "trajectories": 1,
            "replay_ratio": None,
            "eta_seconds": None,
            "searchers": searchers,
            "last_updated_time": at,
            "steps_per_busy_second": steps,
            "trajectories_per_searcher_second": rate,
        }
    )
    return ProgressSample(progress, at)


@dataclass(slots=True)
class ScalingRun:
    """The closed loop. `load` is what there is to do at a number of seconds after the start."""

    load: Callable[[float], Load]
    policy: Autoscaling
    replicas: int = 1
    decider: Callable[..., ScalingMemory] = decide
    noise: float = 0.0
    """Each number that is sampled is off by up to this share, up or down."""
    start_seconds: float = 300.0
    seed: int = 0
    restarts: frozenset[float] = frozenset()
    """Seconds at which the operator loses its memory."""
    losses: dict[float, int] = field(default_factory=dict)
    """Pods that fail at that many seconds and are replaced."""
    now: float = 0.0
    pods: list[Pod] = field(default_factory=list)
    memory: ScalingMemory | None = None
    desired: list[int] = field(default_factory=list)
    """After each tick."""
    started: list[int] = field(default_factory=list)
    """Searchers that deliver, after each tick."""
    _rates: Rates = field(default_factory=Rates)
    _status: int = 0
    _random: random.Random = field(default_factory=random.Random)
    _job: Job = field(init=False)

    def __post_init__(self) -> None:
        self._job = job(replicas=self.replicas, policy=self.policy)
        self._random.seed(self.seed)

    def run(self, seconds: float) -> "ScalingRun":
        end = self.now + seconds
        while self.now < end:
            self.tick()
        return self

    def tick(self) -> None:
        self.now += TICK_SECONDS
        if self.now in self.restarts:
            self.memory = None
        for pod in self._present()[: self.losses.get(self.now, 0)]:
            pod.gone_at = self.now
        load = self.load(self.now)
        self._work(load)
        searcher = SearcherStatus(desired_replicas=self._status)
        self.memory = self.decider(
            self.policy,
            self.replicas,
            self.memory,
            self._sample(load),
            job=replace(self._job, status=JobStatus(searcher=searcher)),
            ready=len(self._delivering()),
            now=START + self.now,
        )
        self._status = self.memory.desired
        self._scale(self.memory.desired)
        self.desired.append(self.memory.desired)
        self.started.append(len(self._delivering()))

    def _present(self) -> list[Pod]:
        return [pod for pod in self.pods if pod.gone_at is None]

    def _delivering(self) -> list[Pod]:
        return [pod for pod in self._present() if pod.delivers_at <= self.now]

    def _heard(self, load: Load) -> int:
        if not load.storage:
            return 0
        return sum(
            pod.delivers_at <= self.now and (pod.gone_at is None or self.now - pod.gone_at <= HEARD_SECONDS)
            for pod in self.pods
        )

    def _work(self, load: Load) -> None:
        """A tick of the searchers, and a step of a trainer that has heard of rows lately."""
        for pod in self._delivering():
            pod.spooled += load.rate * TICK_SECONDS
            if load.storage:
                self._rates.delivered(str(id(pod)), pod.spooled, self.now - pod.delivers_at, self.now)
                pod.spooled = 0.0
        if load.storage and self._heard(load):
            self._rates.stepped(1.0 / load.steps, self.now)

    def _sample(self, load: Load) -> ProgressSample:
        steps = self._rates.steps_per_busy_second()
        rate = self._rates.trajectories_per_searcher_second(self.now)
        return sample(
            START + self.now,
            steps=self._off(steps) if steps else None,
            rate=self._off(rate) if rate else None,
            searchers=self._heard(load),
            state="Training" if load.storage else "WaitingForStorage",
        )

    def _off(self, value: float) -> float:
        return value * (1.0 + self._random.uniform(-self.noise, self.noise))

    def _scale(self, desired: int) -> None:
        present = self._present()
        for _ in range(desired - len(present)):
            self.pods.append(Pod(self.now, self.now + self.start_seconds))
        for pod in present[desired:]:
            pod.gone_at = self.now


def turns(numbers: Iterable[int]) -> int:
    """How often a series changes its direction."""
    moves = [b - a for a, b in _pairs(numbers) if a != b]
    return sum((a > 0) != (b > 0) for a, b in _pairs(moves))


def settled_after(
    numbers: list[int], needed: float, *, slack: float = 0.25, above: float | None = None
) -> float | None:
    """Seconds until the series is right and stays so: not below what is needed less `slack`, and not above it by more
    than `above` (default `slack`) and one; None: never."""
    most = needed * (1 + (slack if above is None else above)) + 1
    off = [i for i, n in enumerate(numbers) if not needed * (1 - slack) <= n <= most]
    last = off[-1] + 1 if off else 0
    return None if last == len(numbers) else last * TICK_SECONDS


def _pairs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    values = list(numbers)
    return list(zip(values, values[1:], strict=False))
