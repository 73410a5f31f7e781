"""The searcher's loop: one thread that keeps the engine full and never waits for the trainer.

    ┌───────────── poller (thread): latest, fetched and verified weights, wanted evaluation
    ▼
swap weights at a step boundary, or begin an evaluation with exactly its weights
    ▼
fill: blocks of the evaluation, then visits (S requests of the walk's next prompt), up to the engine's capacity
    ▼
engine.step() ─► responses ─► reward pool (processes) ─► settled ─► visit complete? ─► spool (thread) ─► bucket
    ▲                                                                └► block complete? ─► evaluation (thread)
    └── pauses, visibly, for: weights (none yet), storage (spool full), reward (too many unscored)
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from tba import telemetry
from tba.contracts.config import LiveConfig
from tba.contracts.errors import CorruptObject
from tba.contracts.records import Outcome, RunRecord, SnapshotManifest
from tba.gate import Gate
from tba.log import (
    DATA_AWAITED,
    POLICY_SWAPPED,
    REWARD_FAILED,
    RUN_FINISHED,
    SNAPSHOT_REJECTED,
    WEIGHTS_AWAITED,
    bind,
    log,
)
from tba.prompts import PromptSet, PromptWalk, load_prompt_set
from tba.protocol.latest import TERMINAL
from tba.rewards.sandbox import RewardPool, RewardResult
from tba.searcher.engines.engine import Engine, Response
from tba.searcher.evaluate import Evaluation, LoadPrompts
from tba.searcher.meter import Meter
from tba.searcher.rewarding import Rewarding
from tba.searcher.spool import Spool
from tba.searcher.stats import Phase, SearcherStats
from tba.searcher.sync import Poller
from tba.searcher.work import EvalWork, Settled, Visit, Work, make_request, request_seed
from tba.snapshots import Snapshot
from tba.stop import StopFlag
from tba.store import ObjectStore

_LOOK_SECONDS = 5.0
"""Visits wait so long for storage to say which block of an evaluation is next."""
_LOOK_STEP_SECONDS = 0.002
_SAY_SECONDS = 30.0
_FAILURE_SECONDS = 1.0
"""At least so long between two lines about rewards that failed: a broken one fails thousands of times a second."""
_UNSCORED_PER_CAPACITY = 4
"""Responses that may wait for a reward, in multiples of the engine's capacity."""
_SETTLE_SECONDS = 10.0
"""At most so long after SIGTERM for rewards under way."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the loop works with."""

    store: ObjectStore
    engine: Engine
    pool: RewardPool
    poller: Poller
    spool: Spool
    record: RunRecord
    prompts: PromptSet
    walk: PromptWalk
    incarnation: str
    settings: Callable[[], LiveConfig]
    samples_per_prompt: Callable[[], int]
    stats: SearcherStats
    stopped: StopFlag
    exit_when_done: bool
    grace_seconds: float
    load_prompts: LoadPrompts = load_prompt_set
    idle_seconds: float = 0.05
    peak_flops: float | None = None
    gate: Gate | None = None
    """Of a searcher that shares its device with the trainer."""
    free_memory: bool = False
    """It leaves the device's memory too while it sleeps."""


class SearcherLoop:
    """Call `run`."""

    def __init__(self, around: Surroundings, *, heartbeat: telemetry.Heartbeat | None = None) -> None:
        self._a = around
        self._heartbeat = heartbeat or telemetry.Heartbeat(600.0)
        around.stats.begin()
        self._meter = Meter(around.stats, around.peak_flops)
        self._rewarding = Rewarding(around.pool)
        self._next_request = 0
        self._next_visit = 0
        self._slots: dict[int, tuple[Work, int]] = {}  # request id -> its work and number there
        self._evaluation: Evaluation | None = None
        self._looked_since = 0.0
        self._policies: set[tuple[int, int]] = set()
        self._said_at = 0.0
        self._failure_told_at = 0.0
        self._untold_failures = 0
        self._held: str | None = None
        self._asleep = False
        self._manifest: SnapshotManifest | None = None

    @property
    def ready(self) -> tuple[bool, str]:
        """Whether there are weights: the answer of /readyz."""
        return self._held is not None, self._held or self._a.poller.detail

    def run(self) -> int:
        """Until SIGTERM (143), or the end of the run if `exit_when_done` (0). Raises what ended a thread."""
        while not self._a.stopped.is_set():
            self._heartbeat.beat()
            if self._ended():
                if self._a.exit_when_done:
                    self._wind_up()
                    return 0
                self._pause("wait_idle", "the run has ended", seconds=10 * self._a.idle_seconds)
                continue
            self.turn()
        self._wind_up()
        return 143

    def turn(self) -> None:
        """Once around."""
        a = self._a
        a.poller.check()
        a.spool.check()
        self._rewarding.follow(a.settings())
        self._settle()
        a.spool.tick()
        if a.gate is not None and not self._has_turn(a.gate):
            return
        self._sync()
        if a.gate is not None and not a.gate.open:
            return
        obstacle = self._obstacle()
        if obstacle is not None:
            self._pause(*obstacle)
            return
        self._fill()
        if a.engine.in_flight == 0:  # an evaluation's next block is being looked for
            self._pause("wait_idle", "nothing to generate", seconds=_LOOK_STEP_SECONDS)
            return
        with a.stats.piece("generate"):
            responses = a.engine.step()
        for response in responses:
            self._receive(response)

    # --- turns ---

    def _has_turn(self, gate: Gate) -> bool:
        """Whether the engine may work. If not: see that it sleeps, say so, and wait a moment."""
        if gate.open:
            if self._asleep:
                self._asleep = False
                self._a.engine.wake()
            gate.awake()
            return True
        with self._a.stats.piece("asleep"):
            if not self._asleep:
                self._asleep = True
                self._a.engine.sleep(free_memory=self._a.free_memory)
            gate.asleep()
            gate.wait(self._a.idle_seconds)
        return False

    # --- weights ---

    def _sync(self) -> None:
        if self._evaluation is not None:
            self._evaluate()
            return
        wanted = self._a.poller.evaluation()
        if wanted is not None and self._may_swap():
            self._begin_evaluation(*wanted)
        elif self._may_swap():
            staged = self._a.poller.take()
            if staged is not None:
                self._load(staged)

    def _may_swap(self) -> bool:
        return self._a.settings().sync.swap == "InFlight" or self._a.engine.in_flight == 0

    def _load(self, snapshot: Snapshot) -> bool:
        stats = self._a.stats
        before = stats.load_seconds
        if self._held is None and self._a.gate is not None:
            self._a.gate.starting()  # an engine takes its time
        try:
            with stats.piece("load"):
                self._a.engine.load(snapshot)
        except CorruptObject as error:
            self._a.poller.refused(snapshot.key, error, held=self._held)
            return False
        seconds = stats.load_seconds - before
        self._meter.loaded(snapshot)
        self._held, self._manifest = snapshot.key, snapshot.manifest
        policy = snapshot.manifest.policy
        self._policies.add(policy)
        stats.versions_loaded = len(self._policies)
        telemetry.SYNC_SECONDS.labels("apply").observe(seconds)
        bind(policy_version=policy.version)
        log.info(
            POLICY_SWAPPED,
            epoch=policy.epoch,
            version=policy.version,
            in_flight=self._a.engine.in_flight,
            seconds=round(seconds, 4),
        )
        return True

    # --- evaluation ---

    def _begin_evaluation(self, key: str, snapshot: Snapshot | None) -> None:
        if snapshot is not None and not self._load(snapshot):
            self._a.poller.evaluation_finished(key)
            return
        self._a.poller.evaluation_started(key)
        # The poller may count weights as held that the engine has refused.
        request = self._manifest.evaluation if self._manifest and self._held == key else None
        if request is None:
            log.warning(SNAPSHOT_REJECTED, key=key, error="it asks for no evaluation, or the engine has other weights")
            self._a.poller.evaluation_finished(key)
            return
        self._looked_since = time.monotonic()
        self._evaluation = Evaluation(
            self._a.store,
            key,
            request,
            offset=int(self._a.incarnation, 16),
            stopped=self._a.stopped.is_set,
            load_prompts=self._a.load_prompts,
        )

    def _evaluate(self) -> None:
        evaluation = self._evaluation
        assert evaluation is not None
        latest = self._a.poller.latest
        withdrawn = latest is not None and latest.evaluation != evaluation.key
        at_work = any(isinstance(work, EvalWork) for work, _ in self._slots.values())
        if evaluation.over or (withdrawn and not at_work):
            self._a.stats.eval_blocks += evaluation.uploaded
            evaluation.close()
            self._a.poller.evaluation_finished(evaluation.key)
            self._evaluation = None
        elif withdrawn:
            evaluation.stop_looking()

    def _fill_evaluation(self, evaluation: Evaluation) -> bool:
        """Submit blocks up to the engine's capacity; whether visits should wait, because another is about to be found.

        Weights stay as they are until an evaluation is over, so it goes first, and quickly.
        """
        engine = self._a.engine
        while engine.in_flight < engine.capacity:
            work = evaluation.poll()
            if work is None:
                break
            self._looked_since = time.monotonic()
            self._submit_block(evaluation, work)
        return evaluation.looking and time.monotonic() - self._looked_since < _LOOK_SECONDS

    def _submit_block(self, evaluation: Evaluation, work: EvalWork) -> None:
        nonce = evaluation.key
        greedy = evaluation.request.sampling == "greedy"
        for index in range(work.size):
            seed = request_seed(self._seed, nonce, work.prompt_id(index), index % work.samples)
            self._submit(work, index, seed=seed, greedy=greedy)

    # --- generation ---

    @property
    def _seed(self) -> int:
        return self._a.record.config.objective.seed

    def _obstacle(self) -> tuple[Phase, str] | None:
        a = self._a
        if self._held is None:
            return "wait_weights", f"no weights yet: {a.poller.detail}"
        if a.spool.full:
            return "wait_storage", f"{a.spool.pending_shards} shards wait for storage: {a.spool.detail}"
        if self._rewarding.unscored > _UNSCORED_PER_CAPACITY * max(a.engine.capacity, 1):
            return "wait_reward", f"{self._rewarding.unscored} responses wait for their reward"
        return None

    def _fill(self) -> None:
        a = self._a
        wanted = a.poller.has_staged or a.poller.evaluation() is not None
        if wanted and not self._may_swap() and self._evaluation is None:
            return  # BetweenBatches: run empty first
        if self._evaluation is not None and self._fill_evaluation(self._evaluation):
            return
        while a.engine.in_flight < a.engine.capacity:
            visit = Visit(
                number=self._next_visit,
                prompt=next(a.walk),
                size=a.samples_per_prompt(),
                prompts=a.prompts,
                temperature=a.record.config.task.sampling.temperature,
            )
            self._next_visit += 1
            for j in range(visit.size):
                self._submit(visit, j, seed=request_seed(self._seed, a.incarnation, visit.number, j), greedy=False)

    def _submit(self, work: Work, index: int, *, seed: int, greedy: bool) -> None:
        config = self._a.record.config
        sampling = config.task.sampling
        prompt = work.prompts.prompt_tokens(work.prompt_id(index)).tolist()
        if index == 0 or work.prompt_id(index) != work.prompt_id(index - 1):
            self._meter.prompt(len(prompt))
        request = make_request(
            self._next_request,
            prompt,
            max_tokens=sampling.max_tokens,
            max_model_len=config.model.max_model_len,
            temperature=sampling.temperature,
            greedy=greedy,
            seed=seed,
            stop=sampling.stop,
        )
        self._next_request += 1
        self._slots[request.id] = (work, index)
        self._a.engine.submit(request)

    def _receive(self, response: Response) -> None:
        work, index = self._slots.pop(response.id)
        self._a.stats.generated_rows += 1
        self._a.stats.generated_tokens += len(response.tokens)
        telemetry.GENERATED_TOKENS.inc(len(response.tokens))
        self._meter.response(len(work.prompts.prompt_tokens(work.prompt_id(index))), len(response.tokens))
        if isinstance(work, Visit):
            work.created_at = time.time()
        if response.error is not None:
            log.warning(REWARD_FAILED, reason="engine", error=response.error)
            self._apply(work, index, response, RewardResult(Outcome.FAILED, None, response.error))
        elif response.reward is not None:
            self._apply(work, index, response, RewardResult(Outcome.SCORED, response.reward))
        else:
            self._rewarding.submit(work, index, response, self._a.engine.decode(response.tokens))

    # --- rewards ---

    def _settle(self) -> None:
        for scored in self._rewarding.settled():
            self._apply(*scored)

    def _apply(self, work: Work, index: int, response: Response, result: RewardResult) -> None:
        stats = self._a.stats
        if result.outcome is Outcome.FAILED:
            stats.failed_rows += 1
        elif result.outcome is Outcome.TIMED_OUT:
            stats.timed_out_rows += 1
        if result.outcome is not Outcome.SCORED:
            telemetry.REWARD_FAILURES.labels(str(result.outcome)).inc()
            self._tell_failure(str(result.outcome), result.error)
        work.settle(index, response, Settled(result.outcome, result.reward))
        if work.done:
            self._complete(work)

    def _tell_failure(self, outcome: str, error: str) -> None:
        self._untold_failures += 1
        now = time.monotonic()
        if now - self._failure_told_at >= _FAILURE_SECONDS:
            log.warning(REWARD_FAILED, outcome=outcome, error=error[:200], failures=self._untold_failures)
            self._failure_told_at, self._untold_failures = now, 0

    def _complete(self, work: Work) -> None:
        self._rewarding.forget(work)
        if isinstance(work, Visit):
            self._a.stats.visits += 1
            self._a.stats.mark()
            self._a.spool.add(work.trajectories())
        elif isinstance(work, EvalWork):
            self._a.stats.eval_rows += work.size
            if self._evaluation is not None:
                self._evaluation.finish(work)

    # --- waiting and ending ---

    def _ended(self) -> bool:
        latest = self._a.poller.latest
        if latest is None or latest.state not in TERMINAL:
            return False
        if self._slots:
            log.info(RUN_FINISHED, state=str(latest.state), unfinished=len(self._slots))
            self._a.engine.abort()
            self._slots.clear()
            self._a.spool.flush()
        self._a.poller.check()
        return True

    def _pause(self, what: Phase, detail: str, seconds: float | None = None) -> None:
        now = time.monotonic()
        if now - self._said_at >= _SAY_SECONDS and what in ("wait_weights", "wait_storage"):
            self._said_at = now
            event = WEIGHTS_AWAITED if what == "wait_weights" else DATA_AWAITED
            log.info(event, awaited=what.removeprefix("wait_"), detail=detail)
        with self._a.stats.piece(what):
            self._a.stopped.wait(self._a.idle_seconds if seconds is None else seconds)

    def _wind_up(self) -> None:
        """Rewards under way are awaited for a moment, finished visits uploaded within the grace period."""
        deadline = time.monotonic() + self._a.grace_seconds
        self._a.engine.abort()
        self._slots.clear()
        with self._heartbeat.allow("uploading what is finished", self._a.grace_seconds + 60.0):
            settle_until = time.monotonic() + min(_SETTLE_SECONDS, self._a.grace_seconds / 2)
            while self._rewarding.unscored and time.monotonic() < settle_until:
                self._settle()
                time.sleep(0.01)
            self._a.spool.flush()
            uploaded = self._a.spool.drain(max(0.0, deadline - time.monotonic()))
        if self._evaluation is not None:
            self._evaluation.close()
        log.info(RUN_FINISHED, uploaded=uploaded, pending_shards=self._a.spool.pending_shards)
