"""The trainer: owns the policy, the optimizer, the replay buffer, the versions and the checkpoints of a run."""
