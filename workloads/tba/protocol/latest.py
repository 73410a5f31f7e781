"""Transitions of `latest`, the only mutable object. Each bumps `commit` by one and takes a fresh nonce.

A manifest or checkpoint key carries its epoch, so a transition can refuse what another trainer made. The first snapshot
of an epoch is the restored one: there, and only there, `version` and `step` may fall (a rollback). All raise RunEnded
once the state is terminal.
"""

from tba.contracts.keys import CheckpointKey, WeightsKey
from tba.contracts.records import Latest, RunState

TERMINAL = (RunState.COMPLETE, RunState.FAILED)


class RunEnded(ValueError):
    """The run is Complete or Failed for good: nothing may follow. A trainer that starts on it has nothing to do."""


def first(nonce: str) -> Latest:
    """The first body of a run: epoch 1, nothing published."""
    return Latest(commit=1, epoch=1, version=0, step=0, nonce=nonce)


def taken_over(current: Latest, nonce: str) -> Latest:
    """A new trainer's claim: epoch + 1. Readers keep the old snapshot until the new trainer publishes.

    An evaluation of a future beyond the checkpoint is withdrawn, for it will be rolled back.
    Raises: RunEnded.
    """
    resume_step = CheckpointKey.parse(current.checkpoint).step if current.checkpoint else 0
    return _next(current, nonce, epoch=current.epoch + 1, evaluation=_kept_evaluation(current, resume_step))


def published(
    current: Latest, *, manifest: str, version: int, nonce: str, step: int | None = None, evaluation: bool = False
) -> Latest:
    """A snapshot whose objects are complete; `step` (default `version`) is how far training is by now.

    `evaluation` asks searchers to evaluate it, in place of any other. The same version may be published again.
    Raises: ValueError if the key is of another epoch or version, or the version falls within the epoch.
    """
    key = WeightsKey.parse(manifest)
    _own_epoch(current, "snapshot", key.epoch)
    step = version if step is None else step
    if key.version != version or step < version:
        raise ValueError(f"a snapshot of version {version} at step {step} cannot have the key {manifest}")
    restored = _snapshot_epoch(current) != current.epoch
    if not restored and version < current.version:
        raise ValueError(f"version falls only at a take-over, got {version} after {current.version}")
    kept = _kept_evaluation(current, version) if restored else current.evaluation
    return _next(
        current,
        nonce,
        version=version,
        step=_progress(current, step),
        manifest=manifest,
        evaluation=manifest if evaluation else kept,
    )


def checkpointed(current: Latest, checkpoint: str, nonce: str) -> Latest:
    """A checkpoint whose objects are complete.

    Raises: ValueError if the key is of another epoch, or its step falls within the epoch.
    """
    key = CheckpointKey.parse(checkpoint)
    _own_epoch(current, "checkpoint", key.epoch)
    if current.checkpoint is not None:
        before = CheckpointKey.parse(current.checkpoint)
        if before.epoch == key.epoch and key.step < before.step:
            raise ValueError(f"a checkpoint's step never falls within an epoch, got {key.step} after {before.step}")
    return _next(current, nonce, step=_progress(current, key.step), checkpoint=checkpoint)


def window_advanced(current: Latest, nonce: str) -> Latest:
    """Nothing but a new window for shards."""
    return _next(current, nonce)


def evaluation_wanted(current: Latest, manifest: str, nonce: str) -> Latest:
    """Ask searchers to evaluate a snapshot, in place of any other.

    Raises: ValueError if the key is of a later epoch.
    """
    key = WeightsKey.parse(manifest)
    if key.epoch > current.epoch:
        raise ValueError(f"the snapshot to evaluate must be of an epoch <= {current.epoch}, got {manifest}")
    return _next(current, nonce, evaluation=manifest)


def evaluation_done(current: Latest, manifest: str, nonce: str) -> Latest:
    """The evaluation of `manifest` is complete. If another has taken its place, that one stays."""
    done = current.evaluation == manifest
    return _next(current, nonce, evaluation=None if done else current.evaluation)


def finished(current: Latest, state: RunState, nonce: str) -> Latest:
    """The end of the run, for good.

    Raises: ValueError if `state` is not terminal.
    """
    if state not in TERMINAL:
        raise ValueError(f"a run ends as Complete or Failed, got {state}")
    return _next(current, nonce, state=state, evaluation=None)


def _next(current: Latest, nonce: str, **changes: object) -> Latest:
    if current.state in TERMINAL:
        raise RunEnded(f"the run is {current.state} for good, epoch {current.epoch}: nothing may follow")
    if nonce == current.nonce:
        raise ValueError(f"a nonce is used once, got {nonce} again: draw a new one for each commit")
    fields = {name: getattr(current, name) for name in Latest.model_fields}
    return Latest(**{**fields, "commit": current.commit + 1, "nonce": nonce, **changes})


def _own_epoch(current: Latest, kind: str, epoch: int) -> None:
    if epoch != current.epoch:
        raise ValueError(f"a {kind} of epoch {current.epoch} is needed, got one of epoch {epoch}")


def _snapshot_epoch(current: Latest) -> int:
    return WeightsKey.parse(current.manifest).epoch if current.manifest else 0


def _progress(current: Latest, step: int) -> int:
    """Step never falls within an epoch; until the epoch has published, what stands there is the one before's."""
    return max(current.step, step) if _snapshot_epoch(current) == current.epoch else step


def _kept_evaluation(current: Latest, resume_step: int) -> str | None:
    if current.evaluation is None or WeightsKey.parse(current.evaluation).version > resume_step:
        return None
    return current.evaluation
