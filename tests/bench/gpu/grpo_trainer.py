"""Arm 8: `tba trainer` with grpo.py in the place of trajectory balance; all else is the product's.

The product has one objective and its job file names no other. This program changes two things in its own process:

    the learner looks up an objective       ─► gets `grpo`
    rows come in with the sampler's         ─► their sum becomes the row's mu, which otherwise is the trainer's own at
    log-probabilities (logprobsShare: 1)       first use: pi/mu then says how far the policy is from the row's sampler

With ratioAlpha 1 the product's weights are that ratio, cut off at ratioClip (3, as TRL's correction cuts it); each
response is a row of its own (deduplicate: false), so that they are nothing else. The reference is still scored, which
this objective does not need: arm 8 is slower than it had to be by that pass.
"""

import numpy as np
from bench.gpu.grpo import grpo

from tba.cli import main
from tba.shards import ShardBatch
from tba.trainer import learner, startup
from tba.trainer.buffer import AddReport, ReplayBuffer


def response_logprobs(batch: ShardBatch) -> np.ndarray:
    """(n,) float32: log-probability of each response under the weights that sampled it; NaN where it was not told."""
    running = np.concatenate([[0.0], np.cumsum(batch.sampler_logprobs, dtype=np.float64)])
    begin, end = batch.sampler_offsets[:-1], batch.sampler_offsets[1:]
    return np.where(end > begin, running[end] - running[begin], np.nan).astype(np.float32)


def remember_sampler(buffer: ReplayBuffer, batch: ShardBatch) -> None:
    """Give the rows of a shard, which the buffer has just taken, their sampler's log-probability."""
    rows, sums = buffer._rows, response_logprobs(batch)
    new = np.flatnonzero((rows["slot"] >= 0) & np.isnan(rows["mu"]))
    for row, made in zip(new, buffer.trajectory_ids(new), strict=True):
        if (made.incarnation, made.seq) == batch.header.id:
            buffer.set_mu_logprobs(np.array([row]), sums[[made.row]])


class GrpoLearner(learner.Learner):
    """Remembers samplers."""

    def ingest_shard(self, path: str, batch: ShardBatch, *arguments: object, **named: object) -> AddReport:
        """As the learner does, and then so."""
        report = super().ingest_shard(path, batch, *arguments, **named)  # type: ignore[arg-type]
        remember_sampler(self.buffer, batch)
        return report


def put_in_place() -> None:
    """Of this process's learner and objective."""
    learner.lookup = lambda name: grpo
    startup.Learner = GrpoLearner


if __name__ == "__main__":
    put_in_place()
    main()
