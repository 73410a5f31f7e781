"""status, report, inspect and pin over a real local store."""

import json
import sys

import pytest
from support.synthetic_run import latest, log_object, run_record, searcher, whole_run

from tba.cli import main
from tba.contracts import keys
from tba.contracts.errors import UserError
from tba.contracts.records import CheckpointManifest, IngestState, Lineage
from tba.store import open_store


@pytest.fixture
def uri(tmp_path):
    """A bucket with a finished run's history and one checkpoint."""
    store = open_store(f"file://{tmp_path}/store")
    checkpoint = keys.CheckpointKey(50, 1, "0" * 32)
    manifest = CheckpointManifest(
        epoch=1, step=50, nonce="0" * 32, parent=None, files=[], ingest=IngestState(intervals={"1" * 32: [(0, 9)]}),
        lineage=Lineage(), ingest_log_seq=1, metrics_log_seq=1, wall_seconds=120.0, eval_score=0.9,
        eval_scores={40: 0.9, 50: 0.5},
    )  # fmt: skip
    store.put_once(f"{checkpoint.prefix}master.safetensors", b"weights")
    store.put_once(checkpoint.path, manifest.to_json())
    store.put_once(keys.RUN, run_record().to_json())
    store.put_once(*log_object(1, 0, whole_run(120)))
    store.put_once(keys.ShardKey(3, "searcher-0", "1" * 32, 0).path, b"not a shard at all")
    store.cas(keys.LATEST, latest(state="Complete", checkpoint=checkpoint.path, manifest=None).to_json(), None)
    store.close()
    return f"file://{tmp_path}/store"


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    captured = capsys.readouterr()
    return caught.value.code, captured.out, captured.err


def test_status_tells_the_run_from_its_bucket_alone(uri, capsys):
    code, out, _ = run(capsys, "status", uri)
    assert code == 0
    assert "default/arithmetic: step 120/120 · Complete" in out
    assert "searcher-0 11111111: 800 rows, 21 versions" in out
    assert "time of the trainer: forward and backward" in out
    assert "time of the searchers: generate 80.0 %, other 7.0 %, wait for rewards 6.0 %" in out


def test_status_tells_of_responses_without_a_reward_before_any_step(tmp_path, capsys):
    store = open_store(f"file://{tmp_path}/failing")
    store.put_once(keys.RUN, run_record().to_json())
    store.put_once(*log_object(1, 0, [searcher("searcher-0", "1" * 32, step=0, rows=328, failed=328)]))
    store.cas(keys.LATEST, latest(step=0, version=0).to_json(), None)
    _, out, _ = run(capsys, "status", store.uri)
    assert "328 of the trajectories have no reward and are not trained on: see reward_failed" in out
    assert "searcher-0 11111111: 328 rows (328 without a reward)" in out


def test_status_as_json_has_camel_case_names(uri, capsys):
    _, out, _ = run(capsys, "status", uri, "--json")
    found = json.loads(out)
    assert (found["state"], found["step"], found["totalSteps"], found["searchers"]) == ("Complete", 120, 120, 2)
    assert found["searcherIdlePercent"] == pytest.approx(11.0) and found["searcherMfu"] == pytest.approx(0.1)
    assert found["trainerSeconds"]["forward_backward"] > found["trainerSeconds"]["optimizer"] > 0


def test_watch_ends_with_the_run(uri, capsys):
    code, out, _ = run(capsys, "watch", uri)
    assert code == 0
    assert "Complete" in out


def test_report_is_one_file_with_every_figure(uri, tmp_path, capsys):
    code, _, _ = run(capsys, "report", uri, "-o", str(tmp_path / "out" / "report.html"))
    page = (tmp_path / "out" / "report.html").read_text()
    assert code == 0
    assert page.count("<svg") == 16
    assert "no data yet" not in page


def test_a_report_to_standard_output_is_the_page_and_nothing_else(uri, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, _ = run(capsys, "report", uri, "-o", "-")
    assert code == 0 and not (tmp_path / "-").exists()
    assert out.startswith("<!doctype html>") and out.rstrip().endswith("</html>")


@pytest.mark.parametrize("name", ["", "file/report.html", "/proc/report.html"])
def test_a_report_that_cannot_be_written_is_refused_without_a_traceback(uri, tmp_path, capsys, name):
    (tmp_path / "file").touch()
    code, _, err = run(capsys, "report", uri, "-o", str(tmp_path / name))
    assert code == 64
    assert err.startswith(f"error: --output {tmp_path / name} cannot be written (") and err.count("\n") == 1


def test_timelines_of_a_directory_without_any_are_refused_with_what_makes_some(tmp_path, capsys):
    code, _, err = run(capsys, "trace", str(tmp_path))
    assert code == 64 and "holds no *.trace.json: run with `tba run --trace" in err


def test_inspect_shows_a_damaged_shard_with_its_problem(uri, capsys):
    code, out, _ = run(capsys, "inspect", "shards", uri, "--json")
    (row,) = json.loads(out)
    assert code == 0
    assert (row["window"], row["searcher"], row["rows"]) == (3, "searcher-0", None)
    assert row["problem"]


def test_inspect_lists_checkpoints_and_what_was_ingested(uri, capsys):
    (row,) = json.loads(run(capsys, "inspect", "checkpoint", uri, "--json")[1])
    assert (row["step"], row["shardsIngested"], row["pinned"], row["eval"]) == (50, 9, False, 0.5)
    assert row["minutesTrained"] == 2.0
    assert json.loads(run(capsys, "inspect", "snapshots", uri, "--json")[1]) == []
    code, out, _ = run(capsys, "inspect", "buffer", uri)
    assert code == 0
    assert "12500 ingested" in out.replace(",", "")
    assert "[0,9)" in out


def test_a_checkpoint_whose_manifest_is_damaged_is_told_by_its_key_without_a_traceback(uri, tmp_path, capsys):
    manifest = next((tmp_path / "store" / "checkpoints").rglob("manifest.json"))
    manifest.write_bytes(b"garbage")
    code, _, err = run(capsys, "inspect", "checkpoint", uri)
    assert (code, "Traceback" in err) == (1, False)
    assert err.startswith(f"error: {manifest.relative_to(tmp_path / 'store')} cannot be parsed")


def test_the_score_of_a_checkpoint_that_was_evaluated_after_all_checkpoints_is_that_of_the_history(uri, capsys):
    store = open_store(uri)
    newest = keys.CheckpointKey(120, 1, "1" * 32)
    manifest = CheckpointManifest(
        epoch=1, step=120, nonce="1" * 32, parent=keys.CheckpointKey(50, 1, "0" * 32).path, files=[],
        ingest=IngestState(), lineage=Lineage(), ingest_log_seq=1, metrics_log_seq=1, wall_seconds=240.0,
        eval_scores={40: 0.9, 50: 0.5},
    )  # fmt: skip
    store.put_once(newest.path, manifest.to_json())
    store.delete([keys.LATEST])
    store.cas(keys.LATEST, latest(state="Complete", checkpoint=newest.path, manifest=None).to_json(), None)
    store.close()
    rows = json.loads(run(capsys, "inspect", "checkpoint", uri, "--json")[1])
    assert [(row["step"], row["eval"]) for row in rows] == [(120, 1.0), (50, 0.5)]


def test_the_buffer_as_json_has_its_rows_bytes_and_failures(uri, capsys):
    found = json.loads(run(capsys, "inspect", "buffer", uri, "--json")[1])
    assert (found["step"], found["ingestedRows"], found["ingested"][0]["shards"]) == (120, 12500, 9)
    assert min(found["bufferRows"], found["bufferBytes"]) > 0 and found["failedRows"] >= 0


def test_a_pin_is_shown_and_can_be_taken_away(uri, capsys):
    assert run(capsys, "pin", uri, "50")[0] == 0
    assert json.loads(run(capsys, "inspect", "checkpoint", uri, "--json")[1])[0]["pinned"] is True
    assert run(capsys, "pin", uri, "50", "--remove")[0] == 0
    assert json.loads(run(capsys, "inspect", "checkpoint", uri, "--json")[1])[0]["pinned"] is False


def test_a_pin_of_no_checkpoint_names_those_there_are(uri, capsys):
    code, _, err = run(capsys, "pin", uri, "51")
    assert code == 64
    assert "no checkpoint of step 51" in err
    assert "[50]" in err


def test_what_the_sweep_left_of_a_checkpoint_cannot_be_pinned(uri, capsys):
    store = open_store(uri)
    store.delete([f"{keys.CheckpointKey(50, 1, '0' * 32).prefix}master.safetensors"])
    store.close()
    code, _, err = run(capsys, "pin", uri, "50")
    assert (code, "no checkpoint of step 50" in err) == (64, True)


def test_a_row_of_a_piped_table_stays_on_one_line(uri, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    lines = run(capsys, "inspect", "checkpoint", uri)[1].splitlines()
    assert [line.split()[0] for line in lines if keys.CheckpointKey(50, 1, "0" * 32).path in line] == ["50"]
    assert len(lines) == 3  # title, head, row


@pytest.mark.parametrize("command", [["status"], ["report", "-o", "never.html"], ["watch"]], ids=lambda c: c[0])
def test_a_run_of_another_release_is_told_without_a_traceback(uri, capsys, command):
    store = open_store(uri)
    store.delete([keys.RUN])
    store.put_once(keys.RUN, b'{"schemaVersion": 2}')
    store.close()
    code, _, err = run(capsys, command[0], uri, *command[1:])
    assert code == 64
    assert err.startswith(f"error: run.json at {uri} is not of this version: schemaVersion: ")
    assert "Traceback" not in err


@pytest.mark.parametrize("command", [["check"], ["delete", "--yes"]], ids=lambda c: c[0])
def test_storage_commands_go_to_the_endpoint_and_region_of_the_command_line(command, capsys, monkeypatch):
    opened = []

    def refuse(uri, *, endpoint, region, **_):
        opened.append((uri, endpoint, region))
        raise UserError("enough")

    monkeypatch.setattr("tba.cli.target.open_store", refuse)
    address = ["--endpoint", "http://host:1", "--region", "r"]
    assert run(capsys, "storage", command[0], "s3://b/p", *command[1:], *address)[0] == 64
    assert opened == [("s3://b/p", "http://host:1", "r")]


def test_a_place_without_a_run_is_told(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert "no run here yet" in run(capsys, "status", f"file://{tmp_path}/empty")[1]
    code, _, err = run(capsys, "inspect", "snapshots", f"file://{tmp_path}/empty")
    assert (code, "no run at" in err) == (64, True)


def test_a_target_that_is_nothing_is_a_user_error(capsys):
    code, _, err = run(capsys, "status", "nonsense")
    assert code == 64
    assert "no run at 'nonsense': give an s3://" in err


def test_metrics_writes_a_line_a_step_to_standard_output_or_a_file(uri, capsys, tmp_path):
    code, out, _ = run(capsys, "metrics", uri)
    header, *lines = out.splitlines()
    assert code == 0 and len(lines) == 120 and header.startswith("kind,epoch,step,time,")
    assert (
        run(capsys, "metrics", uri, "-k", "eval", "-o", f"{tmp_path}/x/e.jsonl")[1]
        == f"wrote {tmp_path}/x/e.jsonl: 9 rows\n"
    )
    assert json.loads((tmp_path / "x/e.jsonl").read_text().splitlines()[0])["passAt1"] == 0.0


def test_metrics_of_a_run_without_such_rows_says_so_beside_the_output(tmp_path, capsys):
    store = open_store(f"file://{tmp_path}/young")
    store.put_once(keys.RUN, run_record().to_json())
    assert run(capsys, "metrics", store.uri, "--kind", "eval") == (0, "", "the run has no rows of kind eval yet\n")


def test_report_of_a_run_that_has_yet_to_begin_is_a_page_that_says_so(tmp_path, capsys):
    store = open_store(f"file://{tmp_path}/young")
    store.put_once(keys.RUN, run_record().to_json())
    code, page, _ = run(capsys, "report", store.uri, "-o", "-")
    assert code == 0 and "no run here yet" in page


@pytest.mark.parametrize("command", ["metrics", "report", "tensorboard"])
def test_an_address_without_a_run_is_no_run_without_rows(command, tmp_path, capsys):
    code, _, err = run(capsys, command, f"file://{tmp_path}/typo", "-o", f"{tmp_path}/out")
    assert code == 64 and "no run at" in err and "Check the URI" in err
    assert not (tmp_path / "out").exists()


def test_tensorboard_follows_a_run_that_is_made_anew(tmp_path, capsys, monkeypatch):
    store = open_store(f"file://{tmp_path}/store")

    def make(run_id, steps, state):
        store.put_once(keys.RUN, run_record().model_copy(update={"run_id": run_id}).to_json())
        store.put_once(*log_object(1, 0, whole_run(steps)))
        store.cas(keys.LATEST, latest(state=state, nonce=run_id).to_json(), None)

    def anew(_seconds):
        store.delete([info.key for info in list(store.list_after(""))])
        make("b" * 32, 20, "Complete")

    make("a" * 32, 40, "Running")
    monkeypatch.setattr("tba.cli.tensorboard.time.sleep", anew)
    code, out, _ = run(capsys, "tensorboard", f"file://{tmp_path}/store", "-o", f"{tmp_path}/tb", "--follow")
    assert code == 0
    assert [line.rpartition(" ")[2] for line in out.splitlines()] == ["40", "20"]
    assert len(list((tmp_path / "tb").iterdir())) == 1


def test_tensorboard_writes_event_files_and_with_follow_ends_as_the_run_did(uri, capsys, tmp_path):
    code, out, _ = run(capsys, "tensorboard", uri, "-o", f"{tmp_path}/tb", "--follow")
    assert code == 0 and "to step 120" in out
    assert len(list((tmp_path / "tb").glob("events.out.tfevents.*"))) == 1


def test_tensorboard_without_its_package_says_which_one(uri, capsys, tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "tba.report.event_files", raising=False)
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    code, _, err = run(capsys, "tensorboard", uri, "-o", f"{tmp_path}/tb")
    assert code == 64 and "needs the package tensorboardX" in err and "pip install" in err


def test_a_run_directory_whose_record_was_cut_short_is_told_with_the_remedy(tmp_path, capsys):
    (tmp_path / "storage.json").write_bytes(b'{"uri": "fi')
    code, _, err = run(capsys, "status", str(tmp_path))
    assert code == 64
    assert f"{tmp_path}/storage.json names no storage any more: is no valid JSON" in err
    assert "Delete it; `tba run` with the run's --storage writes it again" in err
