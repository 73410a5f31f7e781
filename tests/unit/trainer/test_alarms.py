"""Alerts: raised when something is wrong for long enough, worded the same as long as it lasts."""

import pytest

from tba.contracts.config import ConfigMapRef, Reward
from tba.contracts.errors import StoreUnavailable
from tba.store import AccessDenied, Weather
from tba.trainer.alarms import Alarms, reward_label
from tba.trainer.outage import Outage

NOON = 1_700_000_000.0


def reasons(alarms: Alarms, now: float = NOON) -> list[str]:
    return [alert.reason for alert in alarms.alerts(now)]


def test_nothing_is_wrong_with_a_trainer_that_has_just_started():
    assert reasons(Alarms()) == []


@pytest.mark.parametrize(("silent", "told"), [(1799.0, []), (1801.0, ["SyncStalled"])])
def test_silence_beyond_the_timeout_is_told(silent, told):
    assert reasons(Alarms(stall_timeout_seconds=1800.0, data_since=NOON - silent)) == told


def test_no_rows_are_missed_once_none_are_awaited():
    assert reasons(Alarms(stall_timeout_seconds=1.0, data_since=None)) == []


def test_an_alert_reads_the_same_as_long_as_it_lasts():
    alarms = Alarms(stall_timeout_seconds=10.0, data_since=NOON)
    assert alarms.alerts(NOON + 20) == alarms.alerts(NOON + 900)
    assert "2023-11-14 22:13:20 UTC" in alarms.alerts(NOON + 20)[0].message


@pytest.mark.parametrize(("lasts", "told"), [(14.0, []), (16.0, ["StorageUnreachable"])])
def test_requests_that_fail_for_more_than_a_moment_are_told_with_their_error(lasts, told):
    alarms = Alarms(weather=Weather(clock=lambda: NOON))
    alarms.weather.failed("connection refused")
    alarms.weather.failed("server answered 503")
    assert reasons(alarms, NOON + lasts) == told
    assert "server answered 503" in alarms.storage_trouble(NOON + 16)
    alarms.weather.answered()
    assert reasons(alarms, NOON + lasts) == []


def test_denied_access_that_is_sat_out_counts_as_unreachable():
    outage = Outage("publish", give_up_seconds=1e9)
    alarms = Alarms(outages=lambda: [outage])
    outage.failed(AccessDenied("server answered 403 AccessDenied"))
    assert outage.trouble is not None
    began = outage.trouble.since
    outage.failed(StoreUnavailable("still 403"))
    [alert] = alarms.alerts(began + 20)
    assert alert.reason == "StorageUnreachable" and "still 403" in alert.message
    outage.ended()
    assert reasons(alarms, began + 20) == []


@pytest.mark.parametrize(
    ("signal_groups", "groups", "told"),
    [(0, 139, []), (0, 140, ["NoRewardSignal"]), (6, 140, ["NoRewardSignal"]), (7, 140, []), (80, 1000, [])],
)
def test_rewards_that_never_differ_are_told_after_twenty_batches(signal_groups, groups, told):
    alarms = Alarms(reward="gsm8k")
    alarms.learned(signal_groups, groups, groups_per_batch=7)
    assert reasons(alarms) == told
    if told:
        message = alarms.alerts(NOON)[0].message
        assert "gsm8k" in message and "maxTokens" in message


def test_pass_at_k_of_version_0_tells_before_there_are_batches_and_is_then_overruled_by_them():
    alarms = Alarms(first_pass_at_k=0.04)
    assert reasons(alarms) == ["NoRewardSignal"]
    alarms.learned(70, 140, groups_per_batch=7)
    assert reasons(alarms) == []
    assert reasons(Alarms(first_pass_at_k=0.05)) == []


@pytest.mark.parametrize(
    ("reward", "label"),
    [
        (Reward(name="gsm8k"), "gsm8k"), (Reward(entrypoint="a.b:c"), "a.b:c"),
        (Reward(config_map_ref=ConfigMapRef(name="mine", key="r.py")), "mine/r.py"),
    ],
)  # fmt: skip
def test_a_reward_is_called_what_its_job_calls_it(reward, label):
    assert reward_label(reward) == label
