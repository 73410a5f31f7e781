"""Writes the chart's Grafana dashboard; `--check` exits 1 if the committed one differs.

Both roles show all workload metrics, those of the other role at 0: every expression says whose it means.
"""

import json
from pathlib import Path
from typing import Any

from generated import write_or_check

TARGET = Path(__file__).parent.parent / "charts" / "tba-operator" / "files" / "dashboard.json"
# tba_dev_…: the pods' labels, as the chart's PodMonitor hands them on.
JOB = 'namespace="$namespace",tba_dev_job_name="$job"'
TRAINER = f'{JOB},tba_dev_role="trainer"'
SEARCHER = f'{JOB},tba_dev_role="searcher"'
OF_JOB = 'namespace="$namespace",name="$job"'

Panel = tuple[str, str, list[tuple[str, str]]]
"""(title, unit, [(legend, expression)])."""


def _quantiles(metric: str, labels: str, by: str = "") -> list[tuple[str, str]]:
    legend = f" {{{{{by}}}}}" if by else ""
    groups = f"le, {by}" if by else "le"
    return [
        (f"p{q}{legend}", f"histogram_quantile(0.{q}, sum by ({groups}) (rate({metric}_bucket{{{labels}}}[5m])))")
        for q in (50, 95)
    ]


SECTIONS: dict[str, list[Panel]] = {
    "Learning": [
        ("Reward of the last batch", "none", [("reward", f"tba_reward_mean{{{TRAINER}}}")]),
        ("Step", "none", [("step", f"tba_step{{{TRAINER}}}")]),
        ("Loss", "none", [("loss", f"tba_loss{{{TRAINER}}}")]),
        (
            "Distance to the reference, nats",
            "none",
            [("KL", f"tba_kl{{{TRAINER}}}"), ("log Z", f"tba_log_z{{{TRAINER}}}")],
        ),
        (
            "Groups with signal, effective sample size",
            "percentunit",
            [
                ("groups with signal", f"tba_signal_groups_fraction{{{TRAINER}}}"),
                ("effective sample size", f"tba_ess{{{TRAINER}}}"),
            ],
        ),
        ("Gradient norm", "none", [("norm", f"tba_grad_norm{{{TRAINER}}}")]),
    ],
    "Asynchrony": [
        ("Staleness, steps", "none", _quantiles("tba_staleness_steps", TRAINER)),
        ("Replay ratio", "none", [("ratio", f"tba_replay_ratio{{{TRAINER}}}")]),
        (
            "Trainer waits, share of time",
            "percentunit",
            [("for {{for}}", f"rate(tba_trainer_wait_seconds_total{{{TRAINER}}}[5m])")],
        ),
        (
            "Searchers wait, share of time",
            "percentunit",
            [("for {{for}}", f"avg by (for) (rate(tba_searcher_wait_seconds_total{{{SEARCHER}}}[5m]))")],
        ),
        (
            "Where the trainer's time goes",
            "percentunit",
            [("{{phase}}", f"rate(tba_trainer_phase_seconds_total{{{TRAINER}}}[5m])")],
        ),
        (
            "Where the searchers' time goes",
            "percentunit",
            [("{{phase}}", f"avg by (phase) (rate(tba_searcher_phase_seconds_total{{{SEARCHER}}}[5m]))")],
        ),
        ("Transfer of weights", "s", _quantiles("tba_sync_seconds", JOB, "phase")),
        ("Newest snapshot", "bytes", [("{{kind}}", f"tba_snapshot_bytes{{{TRAINER}}}")]),
    ],
    "Throughput": [
        (
            "Tokens a second",
            "none",
            [
                ("generated", f"sum(rate(tba_generated_tokens_total{{{SEARCHER}}}[5m]))"),
                ("trained", f"sum(rate(tba_trained_tokens_total{{{TRAINER}}}[5m]))"),
            ],
        ),
        (
            "Model FLOPs utilisation",
            "percentunit",
            [
                (
                    "{{pod}}",
                    f"rate(tba_model_flops_total{{{JOB}}}[5m]) / (tba_peak_flops_per_second{{{JOB}}} > 0)",
                )
            ],
        ),
        (
            "Trajectories a second",
            "none",
            [("{{outcome}}", f"sum by (outcome) (rate(tba_trajectories_total{{{TRAINER}}}[5m]))")],
        ),
        ("Processes that answer", "none", [("{{tba_dev_role}}", f"sum by (tba_dev_role) (up{{{JOB}}})")]),
        ("Memory of a process", "bytes", [("{{pod}}", f"process_resident_memory_bytes{{{JOB}}}")]),
        (
            "Reward failures a second",
            "none",
            [("{{reason}}", f"sum by (reason) (rate(tba_reward_failures_total{{{SEARCHER}}}[5m]))")],
        ),
        (
            "Storage requests that failed, a second",
            "none",
            [
                (
                    "{{op}} {{outcome}}",
                    f'sum by (op, outcome) (rate(tba_storage_requests_total{{{JOB},outcome!~"ok|refused"}}[5m]))',
                )
            ],
        ),
    ],
    "Operator": [
        (
            "Conditions of the job",
            "none",
            [("{{type}}", f'max by (type) (tba_job_condition{{{OF_JOB},status="True"}})')],
        ),
        ("Jobs by phase", "none", [("{{phase}}", "sum by (phase) (tba_job_info)")]),
        ("Reconcile", "s", _quantiles("tba_reconcile_seconds", "")),
        (
            "Errors a second",
            "none",
            [
                ("reconcile {{kind}}", "sum by (kind) (rate(tba_reconcile_errors_total[5m]))"),
                (
                    "API {{verb}} {{kind}} {{outcome}}",
                    'sum by (verb, kind, outcome) (rate(tba_api_requests_total{outcome!~"ok|NotFound"}[5m]))',
                ),
            ],
        ),
        ("Jobs that wait for a worker", "none", [("{{pod}}", "tba_queue_depth")]),
        ("Age of the watches", "s", [("{{pod}} {{kind}}", "tba_watch_age_seconds")]),
    ],
}


def dashboard() -> dict[str, Any]:
    """Grafana's JSON model: a row a section, two columns of time series, variables for source, namespace and job."""
    return {
        "title": "Trajectory Balance with Asynchrony",
        "uid": "tba",
        "schemaVersion": 39,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": [_source(), *_variables()]},
        "panels": _panels(),
    }


def _source() -> dict[str, Any]:
    return {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"}


def _variables() -> list[dict[str, Any]]:
    queries = {
        "namespace": "label_values(tba_step, namespace)",
        "job": 'label_values(tba_step{namespace="$namespace"}, tba_dev_job_name)',
    }
    source = {"type": "prometheus", "uid": "$source"}
    return [
        {"name": name, "type": "query", "datasource": source, "query": query, "refresh": 2}
        for name, query in queries.items()
    ]


def _panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    y = 0
    for title, panels in SECTIONS.items():
        place = {"h": 1, "w": 24, "x": 0, "y": y}
        found.append({"id": len(found) + 1, "title": title, "type": "row", "collapsed": False, "gridPos": place})
        for number, panel in enumerate(panels):
            place = {"h": 8, "w": 12, "x": 12 * (number % 2), "y": y + 1 + 8 * (number // 2)}
            found.append(_panel(len(found) + 1, place, panel))
        y += 1 + 8 * ((len(panels) + 1) // 2)
    return found


def _panel(number: int, place: dict[str, int], panel: Panel) -> dict[str, Any]:
    title, unit, targets = panel
    return {
        "id": number,
        "title": title,
        "type": "timeseries",
        "datasource": {"type": "prometheus", "uid": "$source"},
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
        "targets": [
            {"refId": chr(65 + i), "legendFormat": legend, "expr": expr} for i, (legend, expr) in enumerate(targets)
        ],
    }


if __name__ == "__main__":
    raise SystemExit(write_or_check(TARGET, json.dumps(dashboard(), indent=1) + "\n", __doc__))
