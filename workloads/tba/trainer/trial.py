"""Tries a run's reward before `run.json` fixes it: a mistake ends the trainer at once, not every searcher later."""

from pathlib import Path

from tba.contracts.runfile import RunFile
from tba.log import REWARD_FAILED, log
from tba.rewards.sandbox import RewardPool, reward_source


def try_reward(run: RunFile) -> str | None:
    """Load the reward in a process of its own; returns its code if that must go into the bucket (`configMapRef`).

    Raises: UserError if there is no such reward, or it cannot be loaded or takes other parameters.
    """
    folder = Path(run.base_dir) if run.base_dir else None
    reward = run.config.task.reward
    source = reward_source(reward, folder)
    if run.base_dir is None:  # `tba run` has tried it, or has no searchers here and so perhaps no reward
        try:
            RewardPool(reward, num_workers=1, search_path=folder, code=source.text).close()
        except RuntimeError as error:  # not the user's mistake: searchers will see
            log.warning(REWARD_FAILED, reason="start", error=str(error))
    return source.text
