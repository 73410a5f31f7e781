"""A `/progress` answer."""

from typing import Any

from tba.contracts.history import Progress


def a_progress(**changes: Any) -> Progress:
    """In the middle of a run."""
    fields: dict[str, Any] = {
        "run_id": "r", "state": "Training", "epoch": 1, "step": 4, "total_steps": 9, "percentage": 44.0,
        "policy_version": 4, "reward": 0.5, "eval_score": None, "staleness_mean": 1.0, "trainer_idle_percent": 3.0,
        "trajectories": 100, "replay_ratio": 1.0, "eta_seconds": 9.0, "searchers": 2, "last_updated_time": 1e9,
    }  # fmt: skip
    return Progress(**{**fields, **changes})
