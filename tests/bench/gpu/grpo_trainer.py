"""Arm 8: `tba trainer` with grpo.py in the place of trajectory balance; all else is the product's.

The product has one objective and its job file names no other: this program changes in its own process what the learner
looks up. With ratioAlpha 1 the product's weights are the ratio of the policy to each row's sampler, cut off at
ratioClip (3, as TRL's correction cuts it); each response is a row of its own (deduplicate: false), so that they are
nothing else. The reference is still scored, which this objective does not need: arm 8 is slower than it had to be by
that pass.
"""

from bench.gpu.grpo import grpo

from tba.cli import main
from tba.trainer import learner


def put_in_place() -> None:
    """Of this process's objective."""
    learner.lookup = lambda name: grpo


if __name__ == "__main__":
    put_in_place()
    main()
