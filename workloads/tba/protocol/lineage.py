"""Which steps of which epoch belong to the surviving run after rollbacks.

An epoch that resumes at step r discards everything that earlier epochs did beyond r:

    epoch 1   0 ── 5 ── 10 ─ ─ 12      versions 11 and 12 are a discarded future
    epoch 2               └─ 10 ── 11 ── …

A take-over that never reached a checkpoint is missing from the lineage. That is harmless: whoever came after it resumed
at or before its own resume step, and the minimum over later epochs counts that one.
"""

from tba.contracts.records import CheckpointManifest, Lineage, PolicyId


def with_takeover(lineage: Lineage, epoch: int, resume_step: int) -> Lineage:
    """The lineage once `epoch` has resumed at optimizer step `resume_step`.

    Raises: ValueError if `epoch` is not newer than every recorded one, or the step is negative.
    """
    newest = max(lineage.resume_steps, default=0)
    if epoch <= newest:
        raise ValueError(f"epoch must be > {newest}, the newest of the lineage, got {epoch}: take over first")
    if resume_step < 0:
        raise ValueError(f"resume_step must be >= 0, got {resume_step}: use the checkpoint's step")
    return Lineage(resume_steps={**lineage.resume_steps, epoch: resume_step})


def surviving(checkpoint: CheckpointManifest | None, epoch: int) -> Lineage:
    """The lineage as `epoch` sees it when it resumes from `checkpoint` (None: from nothing, at step 0).

    Also what a report uses: `latest.epoch` may have taken over without a checkpoint of its own yet.
    """
    if checkpoint is None:
        return with_takeover(Lineage(), epoch, 0)
    if epoch == checkpoint.epoch:
        return checkpoint.lineage
    return with_takeover(checkpoint.lineage, epoch, checkpoint.step)


def effective_version(lineage: Lineage, policy: PolicyId) -> int:
    """Step of the surviving run that `policy` stands for: the last one that its weights share with it.

    min(its version, resume steps of all later epochs). For staleness, most-on-policy order and `maxPolicyLag`.
    """
    later = (step for epoch, step in lineage.resume_steps.items() if epoch > policy.epoch)
    return min(policy.version, min(later, default=policy.version))


def is_discarded(lineage: Lineage, epoch: int, step: int) -> bool:
    """Whether a row of `epoch` at `step` belongs to a future that a later epoch rolled back."""
    return effective_version(lineage, PolicyId(epoch, step)) < step
