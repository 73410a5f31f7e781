"""`tba render` and the kubectl plugin, with a stand-in for kubectl on PATH."""

import json
import os
import stat
import subprocess
import sys

import pytest
import yaml
from support.jobs import smallest

import tba_operator
from tba.cli import main
from tba_operator.api import Images, parse_job
from tba_operator.cli import describe, kubectl_tba
from tba_operator.manifests import all_children
from tba_operator.world import Settings

CONDITION = {"lastTransitionTime": "2026-11-28T03:00:00Z", "observedGeneration": 1}
RUNNING = {
    "phase": "Running",
    "conditions": [
        {"type": "TrainerReady", "status": "True", "reason": "Ready", "message": "", **CONDITION},
        {"type": "Degraded", "status": "True", "reason": "ImagePullFailed", "message": "no such image", **CONDITION},
    ],
    "searcher": {"replicas": 3, "readyReplicas": 2, "desiredReplicas": 3},
    "progress": {"step": 7, "totalSteps": 700, "reward": 0.25, "stalenessMean": 1.5},
}
EVENTS = [
    {"type": "Warning", "reason": "ImagePullFailed", "message": "no such image", "eventTime": "2026-11-28T03:00:02Z"},
    {"type": "Normal", "reason": "Started", "message": "began", "lastTimestamp": "2026-11-28T03:00:01Z"},
]


def write(directory, data):
    path = directory / "job.yaml"
    path.write_text(yaml.safe_dump(data), encoding="utf-8")
    return path


def run(capsys, entry, *arguments):
    with pytest.raises(SystemExit) as caught:
        entry([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return caught.value.code, captured.out, captured.err


# -- render


def test_help_says_what_render_does_without_loading_it(capsys):
    with pytest.raises(SystemExit):
        main(["render", "--help"])
    own = " ".join(capsys.readouterr().out.split())
    assert tba_operator.COMMANDS["render"].removesuffix(".") in own
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "Print the objects that the operator makes" in capsys.readouterr().out


def test_render_prints_what_the_operator_applies(tmp_path, capsys):
    options = ["-n", "team", "--trainer-image", "t", "--searcher-image", "s"]
    code, out, _ = run(capsys, main, "render", write(tmp_path, smallest()), *options)
    job = parse_job(smallest() | {"metadata": {"name": "gsm8k", "namespace": "team"}})
    assert code == 0
    assert list(yaml.safe_load_all(out)) == all_children(job, Settings(), Images(trainer="t", searcher="s"))


def test_render_as_json_is_one_list(tmp_path, capsys):
    data = smallest() | {"metadata": {"name": "gsm8k", "namespace": "mine"}}
    _, out, _ = run(capsys, main, "render", write(tmp_path, data), "-o", "json")
    found = json.loads(out)
    assert (found["apiVersion"], found["kind"]) == ("v1", "List")
    assert {item["metadata"]["namespace"] for item in found["items"]} == {"mine"}


def test_render_names_a_wrong_field_and_its_remedy(tmp_path, capsys):
    code, out, err = run(capsys, main, "render", write(tmp_path, smallest(searcher={"replica": 3})))
    assert (code, out) == (64, "")
    assert "spec.searcher.replica: unknown field, got 3; did you mean replicas?" in err


def test_render_leaves_a_relative_path_as_the_operator_would(tmp_path, capsys):
    data = smallest(model={"uri": "file://models/llama"})
    _, out, _ = run(capsys, main, "render", write(tmp_path, data))
    assert '"uri":"file://models/llama"' in out


def test_render_says_what_depends_on_the_cluster(tmp_path, capsys):
    metadata = {"name": "gsm8k", "labels": {"kueue.x-k8s.io/queue-name": "team-a"}}
    code, out, err = run(capsys, main, "render", write(tmp_path, smallest() | {"metadata": metadata}))
    assert code == 0 and "kind: StatefulSet" in out
    assert "queue team-a: " in err and "Workload" in err


@pytest.mark.parametrize("text", ["[]", "a: [", ""])
def test_render_refuses_what_is_no_job(tmp_path, capsys, text):
    path = tmp_path / "job.yaml"
    path.write_text(text, encoding="utf-8")
    code, _, err = run(capsys, main, "render", path)
    assert code == 64 and str(path) in err


def test_rendering_needs_no_client_of_the_cluster():
    script = "import sys, tba_operator.cli; print([m for m in ('kopf', 'kubernetes', 'torch') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


# -- kubectl tba


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """A `kubectl` that answers from files and notes how it was called: cluster(jobs, events, error)."""
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(
        f"""#!/bin/sh
echo "$@" >> {tmp_path}/calls
[ -s {tmp_path}/error ] && {{ cat {tmp_path}/error >&2; exit 1; }}
case "$*" in
  *events*) cat {tmp_path}/events ;;
  logs*) echo a line ;;
  *) cat {tmp_path}/1; [ -e {tmp_path}/2 ] && mv {tmp_path}/2 {tmp_path}/1; true ;;
esac
""",
        encoding="utf-8",
    )
    kubectl.chmod(kubectl.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    def prepare(*statuses, error=""):
        for number, status in enumerate(statuses, start=1):
            manifest = smallest() | {"metadata": {"name": "gsm8k", "namespace": "team"}, "status": status}
            (tmp_path / str(number)).write_text(json.dumps(manifest), encoding="utf-8")
        (tmp_path / "events").write_text(json.dumps({"items": EVENTS}), encoding="utf-8")
        (tmp_path / "error").write_text(error, encoding="utf-8")
        return lambda: (tmp_path / "calls").read_text(encoding="utf-8").splitlines()

    return prepare


def test_status_tells_phase_progress_conditions_and_events(cluster, capsys):
    calls = cluster(RUNNING)
    code, out, _ = run(capsys, kubectl_tba, "status", "gsm8k", "-n", "team", "--context", "prod")
    assert code == 0
    assert out.splitlines() == [
        "team/gsm8k: Running · step 7/700 · reward 0.250 · staleness 1.5 · searchers 2/3 · ImagePullFailed",
        "storage: s3://b/run (`tba report s3://b/run` and other verbs of `tba` read it)",
        "  TrainerReady=True Ready (since 2026-11-28T03:00:00Z)",
        "  Degraded=True ImagePullFailed: no such image (since 2026-11-28T03:00:00Z)",
        "  2026-11-28T03:00:01Z Normal Started: began",
        "  2026-11-28T03:00:02Z Warning ImagePullFailed: no such image",
    ]
    assert calls()[0] == "get tbajobs.tba.dev gsm8k --output json --namespace team --context prod"


def test_a_job_that_nobody_picked_up_says_so():
    assert "does the operator run" in describe(smallest(), [])


@pytest.mark.parametrize(("end", "expected"), [("Complete", 0), ("Failed", 1)])
def test_watch_ends_with_the_job(cluster, capsys, end, expected):
    finished = {"phase": end, "conditions": [{"type": end, "status": "True", "reason": "Done", **CONDITION}]}
    cluster(RUNNING, finished)
    code, out, _ = run(capsys, kubectl_tba, "watch", "gsm8k", "--interval", "0")
    assert code == expected
    assert [line.split(" · ")[0] for line in out.splitlines()] == ["gsm8k: Running", f"gsm8k: {end}"]


def test_watch_outlives_an_api_server_that_restarts(cluster, tmp_path, monkeypatch, capsys):
    finished = {
        "phase": "Complete",
        "conditions": [{"type": "Complete", "status": "True", "reason": "Done", **CONDITION}],
    }
    cluster(RUNNING, finished)
    slept = []

    def sleep(_seconds):
        slept.append(1)
        told = "The connection to the server was refused" if len(slept) <= 2 else ""
        (tmp_path / "error").write_text(told, encoding="utf-8")

    monkeypatch.setattr("tba_operator.cli.time.sleep", sleep)
    assert run(capsys, kubectl_tba, "watch", "gsm8k")[0] == 0
    assert len(slept) == 3, "between two looks, and twice before the server was back"


def test_logs_are_those_of_the_roles_container_however_many_pods_and_whichever_still_starts(cluster, capfd):
    calls = cluster()
    code, out, _ = run(capfd, kubectl_tba, "logs", "gsm8k", "--role", "searcher", "-f")
    assert (code, out) == (0, "a line\n")
    assert calls() == [
        "logs --selector tba.dev/job-name=gsm8k,tba.dev/role=searcher --prefix --tail=-1 --container searcher "
        "--ignore-errors --max-log-requests=10000 --follow"
    ]


@pytest.mark.parametrize(
    ("error", "code"),
    [('Error from server (NotFound): tbajobs.tba.dev "x" not found', 64),
     ("E1128 memcache.go: retry\nThe connection to the server localhost:8080 was refused", 2)],
)  # fmt: skip
def test_an_absent_job_is_the_users_error_and_an_absent_cluster_is_not(cluster, capsys, error, code):
    cluster(error=error)
    found, _, err = run(capsys, kubectl_tba, "status", "x")
    assert found == code
    assert error.splitlines()[-1] in err and "memcache" not in err


def test_the_plugin_has_every_verb_of_the_command_line(capsys):
    code, out, _ = run(capsys, kubectl_tba, "--help")
    assert code == 0
    assert "Usage: kubectl tba" in out
    assert all(f"  {verb} " in out for verb in ("run", "report", "render", "status", "logs"))


def test_without_kubectl_the_plugin_says_what_to_do(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    code, _, err = run(capsys, kubectl_tba, "status", "x")
    assert code == 64 and "kubectl: not found" in err
