"""Writes the chart's Grafana dashboard; `--check` exits 1 if the committed one differs."""

import json
from pathlib import Path

from generated import write_or_check

TARGET = Path(__file__).parent.parent / "charts" / "tba-operator" / "files" / "dashboard.json"
JOB = 'namespace="$namespace",tba_dev_job_name="$job"'
# (title, unit, [(legend, expression)])
PANELS = [
    ("Reward of the last batch", "none", [("reward", f"tba_reward_mean{{{JOB}}}")]),
    ("Step", "none", [("step", f"tba_step{{{JOB}}}")]),
    ("Loss", "none", [("loss", f"tba_loss{{{JOB}}}")]),
    ("KL to the reference", "none", [("KL", f"tba_kl{{{JOB}}}"), ("log Z", f"tba_log_z{{{JOB}}}")]),
    (
        "Staleness, steps",
        "none",
        [
            (f"p{q}", f"histogram_quantile(0.{q}, sum by (le) (rate(tba_staleness_steps_bucket{{{JOB}}}[5m])))")
            for q in (50, 95)
        ],
    ),
    (
        "Trainer waits, share of time",
        "percentunit",
        [("{{for}}", f"rate(tba_trainer_wait_seconds_total{{{JOB}}}[5m])")],
    ),
    (
        "Searchers wait, share of time",
        "percentunit",
        [("{{for}}", f"avg by (for) (rate(tba_searcher_wait_seconds_total{{{JOB}}}[5m]))")],
    ),
    (
        "Tokens a second",
        "none",
        [
            ("generated", f"sum(rate(tba_generated_tokens_total{{{JOB}}}[5m]))"),
            ("trained", f"sum(rate(tba_trained_tokens_total{{{JOB}}}[5m]))"),
        ],
    ),
    (
        "Trajectories a second",
        "none",
        [("{{outcome}}", f"sum by (outcome) (rate(tba_trajectories_total{{{JOB}}}[5m]))")],
    ),
    ("Replay ratio", "none", [("ratio", f"tba_replay_ratio{{{JOB}}}")]),
    (
        "Reward failures a second",
        "none",
        [("{{reason}}", f"sum by (reason) (rate(tba_reward_failures_total{{{JOB}}}[5m]))")],
    ),
    (
        "Storage requests that failed, a second",
        "none",
        [("{{op}} {{outcome}}", f'sum by (op, outcome) (rate(tba_storage_requests_total{{{JOB},outcome!="ok"}}[5m]))')],
    ),
    ("Jobs by condition", "none", [("{{type}}", 'sum by (type) (tba_job_condition{status="True"})')]),
    (
        "Reconcile, p99",
        "s",
        [("p99", "histogram_quantile(0.99, sum by (le) (rate(tba_reconcile_seconds_bucket[5m])))")],
    ),
    (
        "Queue and watches of the operator",
        "none",
        [("queue", "tba_queue_depth"), ("watch age {{kind}}", "tba_watch_age_seconds")],
    ),
]


def dashboard() -> dict:
    """Grafana's JSON model: two columns of time series, variables for data source, namespace and job."""
    return {
        "title": "Trajectory Balance with Asynchrony",
        "uid": "tba",
        "schemaVersion": 39,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": [_source(), *_variables()]},
        "panels": [_panel(number, *panel) for number, panel in enumerate(PANELS)],
    }


def _source() -> dict:
    return {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"}


def _variables() -> list[dict]:
    queries = {
        "namespace": "label_values(tba_step, namespace)",
        "job": 'label_values(tba_step{namespace="$namespace"}, tba_dev_job_name)',
    }
    source = {"type": "prometheus", "uid": "$source"}
    return [
        {"name": name, "type": "query", "datasource": source, "query": query, "refresh": 2}
        for name, query in queries.items()
    ]


def _panel(number: int, title: str, unit: str, targets: list[tuple[str, str]]) -> dict:
    return {
        "id": number + 1,
        "title": title,
        "type": "timeseries",
        "datasource": {"type": "prometheus", "uid": "$source"},
        "gridPos": {"h": 8, "w": 12, "x": 12 * (number % 2), "y": 8 * (number // 2)},
        "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
        "targets": [
            {"refId": chr(65 + i), "legendFormat": legend, "expr": expr} for i, (legend, expr) in enumerate(targets)
        ],
    }


if __name__ == "__main__":
    raise SystemExit(write_or_check(TARGET, json.dumps(dashboard(), indent=1) + "\n", __doc__))
