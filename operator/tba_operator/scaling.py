"""How many searchers a job needs, with autoscaling mode Managed (operator.md §5). Pure: no I/O, no clock.

    needed = D · P·K ÷ R ÷ r

    D   optimizer steps per second in which the trainer did not wait     Progress.steps_per_busy_second
    P·K rows a step trains on                                            promptsPerBatch · responsesPerPrompt
    R   rows trained per row generated that the user wants               targetReplayRatio
    r   rows a second of one warm searcher, the last known               Progress.trajectories_per_searcher_second

Neither D nor r depends on how many searchers there are, so `needed` is a setpoint and not a correction: pods that are
still starting are capacity already, and waiting for them never leads to asking for more. What keeps that true:

* D leaves out all waiting (for data, for storage, at maxReplayRatio). A starved trainer asks for as many searchers as
  one that is fed.
* A searcher never waits for the trainer, so r is what it can do, not what is taken from it. It does wait for storage:
  samples from an outage are not used, and none of r until the trainer's averages have forgotten it.
* r is wrong while the pool grows: new searchers warm up, and their first shards say little. It is taken once the pool
  has not grown for `WARM_SECONDS`, and not of more searchers than are ready (a restart counts twice for a minute).
  The trainer counts and measures the job's pods alone: searchers that run elsewhere come on top, and may leave.
  Until then the last known r holds, and with none the number of searchers does. A pool that shrinks stays warm.
* If something that all searchers share (bandwidth to the bucket) is the limit, r falls as the pool grows, and the
  answer goes to maxReplicas, the only bound on it.

Source: targetReplayRatio as a setpoint: operator.md §5. Window maximum for scaling down: Kubernetes' HPA.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from tba.contracts.job import Autoscaling
from tba_operator.api import Job
from tba_operator.world import ProgressSample, ScalingMemory

DEAD_BAND = 0.1
"""Relative difference between what is needed and what is there that changes nothing."""
WARM_SECONDS = 120.0
"""A pool that has not grown is warm after this: engines have compiled, and the trainer's averages are of this pool."""
UP_SECONDS = 60.0
"""A need must have lasted so long before searchers are added."""
SMOOTHING_SECONDS = 60.0
"""Time constant of the moving averages of D · P·K and r."""

_USED_STATES = ("Training", "WaitingForData")
_CONFIRMING = 2  # samples at least, however rare they are


def decide(
    policy: Autoscaling,
    replicas: int,
    memory: ScalingMemory | None,
    sample: ProgressSample | None,
    *,
    job: Job,
    ready: int,
    now: float,
) -> ScalingMemory:
    """The number of searchers (`desired`) and what to remember for the next decision.

    `replicas` is spec.searcher.replicas, `ready` the searcher pods that are ready. Without a new sample only the bounds
    are applied.
    """
    memory = _begun(replicas, memory, job, now)
    if sample is not None and sample.received > (memory.last_sample or -math.inf):
        memory = _recommended(policy, _learned(memory, sample, job, ready), sample)
    return replace(memory, desired=_bounded(policy, memory.desired))


def _begun(replicas: int, memory: ScalingMemory | None, job: Job, now: float) -> ScalingMemory:
    """Memory to go on from: what there is; `replicas` if the user has changed it.

    An operator that has just started has none. It goes on from status.searcher.desiredReplicas, if there is one, though
    `replicas` may have been changed while no operator ran: to miss a restart costs a little time, to make one that
    nobody asked for throws searchers away.
    """
    if memory is None:
        desired = job.status.searcher.desired_replicas or replicas
    elif memory.started_from != replicas:
        desired = replicas
    else:
        return memory
    began = ScalingMemory(started_from=replicas, desired=desired, recommendations=((now, float(desired)),))
    if memory is None:
        return began
    return replace(memory, started_from=replicas, desired=desired, recommendations=began.recommendations)


def _learned(memory: ScalingMemory, sample: ProgressSample, job: Job, ready: int) -> ScalingMemory:
    """Demand and rate with a new sample in them."""
    progress, at = sample.progress, sample.received
    elapsed = at - memory.last_sample if memory.last_sample is not None else math.inf
    share = 1.0 - math.exp(-elapsed / SMOOTHING_SECONDS)  # 1 for the first
    memory = replace(memory, last_sample=at)
    if progress.state not in _USED_STATES:
        return replace(memory, pool=None, pool_since=None)
    memory = _pool_seen(memory, progress.searchers, at)
    demand, rate = memory.demand, memory.rate
    steps = progress.steps_per_busy_second
    if steps is not None and steps > 0:
        objective = job.spec.objective
        rows = objective.prompts_per_batch * objective.responses_per_prompt
        demand = demand.with_sample(steps * rows, share)
    measured = progress.trajectories_per_searcher_second
    if measured is not None and measured > 0 and _is_warm(memory, progress.searchers, ready, at):
        rate = rate.with_sample(measured, share)
    return replace(memory, demand=demand, rate=rate)


def _pool_seen(memory: ScalingMemory, searchers: int, at: float) -> ScalingMemory:
    """The pool is the most that was heard of since it was warm, so that a few that come and go do not keep it cold."""
    known, since = memory.pool, memory.pool_since
    if known is not None and since is not None and searchers <= known * (1 + DEAD_BAND):
        return replace(memory, pool=searchers) if at - since >= WARM_SECONDS else memory
    return replace(memory, pool=searchers, pool_since=at)


def _is_warm(memory: ScalingMemory, searchers: int, ready: int, at: float) -> bool:
    lasted = memory.pool_since is not None and at - memory.pool_since >= WARM_SECONDS
    return lasted and 0 < searchers <= ready * (1 + DEAD_BAND)


def _recommended(policy: Autoscaling, memory: ScalingMemory, sample: ProgressSample) -> ScalingMemory:
    """A new number, if the need has been another for long enough. A sample without news speaks for what is there."""
    at, needed = sample.received, float(memory.desired)
    if memory.demand.value is not None and memory.rate.value is not None and sample.progress.state in _USED_STATES:
        needed = memory.demand.value / policy.target_replay_ratio / memory.rate.value
    every = (*memory.recommendations, (at, needed))
    lowest = min(_since(every, at - UP_SECONDS))
    highest = max(_since(every, at - policy.stabilization_seconds))
    desired = memory.desired
    if lowest > desired * (1 + DEAD_BAND):
        desired = _whole(policy, lowest)
    elif _whole(policy, highest) <= desired * (1 - DEAD_BAND):
        desired = _whole(policy, highest)
    horizon = at - max(UP_SECONDS, policy.stabilization_seconds)
    kept = len(_since(every, horizon))
    return replace(memory, desired=desired, recommendations=every[-kept:])


def _since(recommendations: Sequence[tuple[float, float]], start: float) -> list[float]:
    """Needs since then; those of the newest two samples at least."""
    late = [needed for at, needed in recommendations if at >= start]
    return late if len(late) >= _CONFIRMING else [needed for _, needed in recommendations[-_CONFIRMING:]]


def _whole(policy: Autoscaling, needed: float) -> int:
    return _bounded(policy, math.ceil(min(needed, 1e9)))


def _bounded(policy: Autoscaling, desired: int) -> int:
    highest = desired if policy.max_replicas is None else policy.max_replicas
    return max(1, policy.min_replicas, min(desired, highest))
