from tba_operator.__main__ import main, probes, with_identity
from tba_operator.metrics import Metrics
from tba_operator.world import Settings


def test_settings_that_cannot_be_read_end_the_process_with_their_names(monkeypatch, capsys):
    monkeypatch.setenv("TBA_WORKERS", "many")
    assert main() == 64
    assert "TBA_WORKERS: must be a whole number, got 'many'" in capsys.readouterr().err


def test_a_replica_without_a_name_takes_its_hosts():
    assert with_identity(Settings()).identity != ""
    assert with_identity(Settings(identity="pod-1")).identity == "pod-1"


def test_a_stale_watch_fails_the_liveness_probe_by_name():
    clock = [0.0]
    metrics = Metrics(clock=lambda: clock[0])
    healthy, _ = probes(metrics, lambda: True, str)
    assert healthy() == (True, "ok")
    metrics.watch_heard("pods")
    clock[0] = 200.0
    assert healthy() == (False, "watches not answered: pods: 200 s")


def test_a_standby_is_alive_and_ready_without_a_watch():
    healthy, ready = probes(Metrics(), lambda: False, str)
    assert healthy() == (True, "ok")
    assert ready() == (True, "standby")


def test_the_leader_says_so():
    assert probes(Metrics(), lambda: True, str)[1]() == (True, "leading")


def test_a_replica_that_cannot_use_its_lease_is_not_ready():
    _, ready = probes(Metrics(), lambda: False, lambda: "leases is forbidden")
    assert ready() == (False, "cannot use the Lease: leases is forbidden")
