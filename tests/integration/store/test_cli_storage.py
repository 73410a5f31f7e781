"""`tba storage` against real stores."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass

import pytest
from support.tiny_run import TinyRun
from typer.testing import CliRunner

from tba.cli.storage import app
from tba.contracts.errors import UserError
from tba.contracts.keys import CheckpointKey, LogKey, ShardKey, WeightsKey
from tba.store import NotFound, open_store
from tba.store.probe import ProbeResult, probe, require


@dataclass
class Refusing:
    """A store whose `method` forgets its condition, as several S3-compatible servers do."""

    inner: object
    method: str

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def put_once(self, key, data):
        if self.method == "put_once":
            return self._overwrite(key, data)
        return self.inner.put_once(key, data)

    def cas(self, key, data, etag):
        if self.method == "cas":
            return self._overwrite(key, data)
        return self.inner.cas(key, data, etag)

    def _overwrite(self, key, data):
        path = self.inner._path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{os.urandom(4).hex()}")
        temporary.write_bytes(data)
        temporary.replace(path)
        return self.inner.head(key).etag


def test_a_passing_store_is_reported_as_json(store):
    document = json.loads(CliRunner().invoke(app, ["check", store.uri, "--json"]).output)
    assert document["uri"] == store.uri
    assert all(each["ok"] for each in document["checks"] if each["severity"] == "error")


def test_a_passing_store_is_reported_as_a_table(local_store):
    table = CliRunner().invoke(app, ["check", local_store.uri])
    assert table.exit_code == 0 and "create_race" in table.output


@pytest.mark.parametrize(("method", "name"), [("put_once", "create_race"), ("cas", "swap_race")])
def test_a_store_that_ignores_conditions_is_refused(local_store, method, name):
    results = probe(Refusing(local_store, method))
    assert [r.name for r in results if not r.ok and r.name == name] == [name]
    with pytest.raises(UserError, match=f"{name}.*unsafeSingleTrainer"):
        require(results)
    assert list(local_store.list_after("")) == []


def test_a_clock_off_by_minutes_is_a_warning_and_by_a_quarter_of_an_hour_an_error(local_store):
    for offset, severity in ((100.0, "warning"), (-1000.0, "error")):
        now = local_store.now() + offset
        (found,) = [r for r in probe(local_store, clock=lambda now=now: now) if r.name == "clock"]
        assert (found.ok, found.severity) == (False, severity)
    require([ProbeResult("clock", False, "", severity="warning")])


def test_deleting_a_run_needs_its_run_file_and_leaves_the_neighbours(store):
    refused = CliRunner().invoke(app, ["delete", store.uri, "--yes"])
    assert isinstance(refused.exception, UserError) and "run.json" in str(refused.exception)
    for key in ("run.json", "latest", "shards/0/a", "shards/0/b"):
        store.put_once(key, b"{}")
    declined = CliRunner().invoke(app, ["delete", store.uri], input="n\n")
    assert declined.exit_code == 1 and store.get("latest").data == b"{}"
    done = CliRunner().invoke(app, ["delete", store.uri, "--yes"])
    assert done.exit_code == 0 and "deleted 4 objects" in done.output
    assert list(store.list_after("")) == []
    with pytest.raises(NotFound):
        store.get("run.json")


def test_what_a_live_run_wrote_after_its_deletion_can_be_deleted_too(store):
    nonce = "0a" * 16
    remains = [
        ShardKey(3, "searcher-0", nonce, 7).path,
        f"{CheckpointKey(40, 1, nonce).prefix}master.safetensors",
        f"{WeightsKey(40, 1, nonce).prefix}model.safetensors",
        LogKey("metrics", 1, 9).path,
    ]
    for key in remains:
        store.put_once(key, b"late")
    declined = CliRunner().invoke(app, ["delete", store.uri], input="n\n")
    assert declined.exit_code == 1 and len(list(store.list_after(""))) == 4
    done = CliRunner().invoke(app, ["delete", store.uri, "--yes"])
    assert done.exit_code == 0 and "deleted 4 objects" in done.output
    assert list(store.list_after("")) == []


@pytest.mark.parametrize("foreign", ["shards/0000000003/notes.txt", "thesis.pdf", "weights/model.bin", "a/run.json"])
def test_a_prefix_without_run_file_that_holds_anything_foreign_is_refused_by_its_name(local_store, foreign):
    kept = [ShardKey(3, "searcher-0", "0a" * 16, 7).path, foreign]
    for key in kept:
        local_store.put_once(key, b"mine")
    refused = CliRunner().invoke(app, ["delete", local_store.uri, "--yes"])
    assert isinstance(refused.exception, UserError) and f"no run.json but {foreign}, so" in str(refused.exception)
    assert sorted(info.key for info in local_store.list_after("")) == sorted(kept)


def test_an_object_that_anybody_may_call_latest_makes_no_run(local_store):
    local_store.put_once("latest", b"v1.2.3")
    refused = CliRunner().invoke(app, ["delete", local_store.uri, "--yes"])
    assert isinstance(refused.exception, UserError) and "nothing else" in str(refused.exception)
    assert local_store.get("latest").data == b"v1.2.3"


def test_deleting_a_run_leaves_another_that_lies_below_it(tmp_path):
    store, fork = (open_store(f"file://{tmp_path}/{place}") for place in ("run", "run/fork"))
    for key in ("run.json", "latest", "shards/0/a"):
        store.put_once(key, b"{}")
        fork.put_once(key, b"{}")
    assert "but for the runs fork/ within?" in CliRunner().invoke(app, ["delete", store.uri], input="n\n").output
    assert "deleted 3 objects" in CliRunner().invoke(app, ["delete", store.uri, "--yes"]).output
    assert [info.key for info in fork.list_after("")] == ["latest", "run.json", "shards/0/a"]
    assert all(info.key.startswith("fork/") for info in store.list_after(""))


def test_serve_runs_until_a_signal_and_prints_no_secret(tmp_path):
    script = f"from tba.cli.storage import app; app(['serve', {str(tmp_path / 's3')!r}])"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-u", "-c", script], stdout=subprocess.PIPE, env=environment, text=True
    ) as process:
        lines = [process.stdout.readline() for _ in range(3)]
        process.send_signal(signal.SIGTERM)
        lines += process.stdout.readlines()
    assert process.returncode == 0
    assert "serving s3://tba at http://127.0.0.1:" in lines[0]
    secret = (tmp_path / "s3" / "credentials").read_text().split("secret_access_key = ")[1].strip()
    assert not any(secret in line for line in lines)
    assert not (tmp_path / "s3" / "server.json").exists()


@pytest.mark.parametrize("place", ["/proc/tba-check", "/dev/null/tba-check"])
def test_a_place_that_can_hold_no_files_is_told_and_not_a_crash(place):
    result = CliRunner().invoke(app, ["check", f"file://{place}"])
    assert isinstance(result.exception, UserError) and place in str(result.exception)


def test_a_sweep_by_hand_says_first_what_would_go_and_then_deletes_just_that(tmp_path):
    run = TinyRun(tmp_path / "run", min_initial=0)
    trainer = run.trainer()
    run.put_shard(0)
    trainer.run()
    store = run.ready.store
    arguments = ["gc", store.uri, "--grace-seconds", "0", "--keep-last", "1"]
    before = {o.key for o in store.list_after("")}
    planned = CliRunner().invoke(app, [*arguments, "--dry-run"])
    assert planned.exit_code == 0 and {o.key for o in store.list_after("")} == before
    listed = set(planned.output.splitlines()[:-1])
    assert listed and "would delete" in planned.output.splitlines()[-1]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0 and before - {o.key for o in store.list_after("")} == listed
    assert all(key.startswith(("weights/", "checkpoints/")) for key in listed)
