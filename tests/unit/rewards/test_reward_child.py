"""What a reward process answers for what a reward returned."""

import pytest

from tba.rewards.child import _checked


@pytest.mark.parametrize("value", [1e39, -1e39, float("inf"), float("nan")])
def test_a_reward_that_a_shard_cannot_hold_fails_its_own_sample_only(value):
    assert _checked(7, value)[:3] == [7, None, "invalid"]


def test_a_large_reward_within_float32_is_kept():
    assert _checked(7, 1e38) == [7, 1e38]
