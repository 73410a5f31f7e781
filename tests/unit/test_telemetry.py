import json
import socket
import urllib.error
import urllib.request

import pytest

from tba import telemetry

NAMES = {
    "tba_step", "tba_loss", "tba_reward_mean", "tba_log_z", "tba_kl", "tba_ell_std", "tba_beta_ratio",
    "tba_signal_groups_fraction", "tba_ess", "tba_grad_norm", "tba_grad_clip_fraction", "tba_staleness_steps",
    "tba_trainer_wait_seconds", "tba_searcher_wait_seconds", "tba_generated_tokens", "tba_trained_tokens",
    "tba_trajectories", "tba_sync_seconds", "tba_snapshot_bytes", "tba_replay_ratio", "tba_mop_recycles",
    "tba_reward_failures", "tba_storage_requests", "tba_trainer_phase_seconds", "tba_searcher_phase_seconds",
    "tba_model_flops", "tba_peak_flops_per_second",
}  # fmt: skip


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Progress:
    def to_json(self):
        return json.dumps({"step": 7}).encode()


@pytest.fixture
def server():
    running = telemetry.serve(
        0,
        host="127.0.0.1",
        healthy=lambda: (True, "training"),
        ready=lambda: (False, "no weights yet"),
        progress=Progress,
        page=lambda: "<p>ü</p>",
    )
    yield running
    running.close()


def fetch(server, path):
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}{path}", timeout=5) as answer:
            return answer.status, answer.headers, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers, error.read().decode()


def test_every_documented_metric_exists_under_its_name():
    ours = {m.name for m in telemetry.REGISTRY.collect() if m.name.startswith("tba_")}
    assert ours == NAMES


def test_metrics_are_served_with_their_labels(server):
    telemetry.TRAINER_WAIT.labels("data").inc(2)
    telemetry.STALENESS.observe(3)
    status, _, text = fetch(server, "/metrics")
    assert status == 200
    assert 'tba_trainer_wait_seconds_total{for="data"} ' in text
    assert 'tba_staleness_steps_bucket{le="3.0"}' in text
    assert "_created" not in text


def test_a_probe_answers_503_with_the_reason_when_it_fails(server):
    assert fetch(server, "/healthz")[::2] == (200, "ok: training\n")
    assert fetch(server, "/readyz")[::2] == (503, "not ok: no weights yet\n")


def test_progress_and_page_are_served_and_the_page_may_run_no_script(server):
    assert json.loads(fetch(server, "/progress")[2]) == {"step": 7}
    status, headers, text = fetch(server, "/")
    assert (status, text) == (200, "<p>ü</p>")
    assert "default-src 'none'" in headers["Content-Security-Policy"]


def test_an_unknown_path_is_404_and_a_searcher_has_no_progress(server):
    assert fetch(server, "/secrets")[0] == 404
    bare = telemetry.serve(0, host="127.0.0.1", healthy=lambda: (True, ""), ready=lambda: (True, ""))
    try:
        assert fetch(bare, "/progress")[0] == 404
    finally:
        bare.close()


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
@pytest.mark.parametrize(
    ("host", "reached"), [("", ("127.0.0.1", "[::1]")), ("::1", ("[::1]",)), ("127.0.0.1", ("127.0.0.1",))]
)
def test_all_interfaces_are_those_of_both_families(host, reached):
    server = telemetry.serve(0, host=host, healthy=lambda: (True, "training"), ready=lambda: (True, ""))
    try:
        for address in reached:
            with urllib.request.urlopen(f"http://{address}:{server.port}/healthz", timeout=5) as answer:
                assert answer.read() == b"ok: training\n"
    finally:
        server.close()


def test_a_closed_server_has_released_its_port():
    first = telemetry.serve(0, host="127.0.0.1", healthy=lambda: (True, ""), ready=lambda: (True, ""))
    first.close()
    second = telemetry.serve(first.port, host="127.0.0.1", healthy=lambda: (True, ""), ready=lambda: (True, ""))
    second.close()


def test_a_heart_that_does_not_beat_within_its_budget_is_dead():
    clock = Clock()
    heart = telemetry.Heartbeat(10, clock=clock)
    clock.now = 10
    assert heart.alive()[0]
    clock.now = 10.1
    assert heart.alive() == (False, "starting: last progress 10 s ago, budget 10 s")
    heart.beat("step 3")
    assert heart.alive()[0]
    assert heart.age_seconds == 0


def test_a_long_operation_has_its_own_budget_and_ends_with_a_beat():
    clock = Clock()
    heart = telemetry.Heartbeat(10, clock=clock)
    with heart.allow("loading the model", 600):
        clock.now = 500
        assert heart.alive()[0]
    clock.now = 509
    assert heart.alive()[0]
    clock.now = 511
    assert not heart.alive()[0]
