"""A timeline that a viewer can open, whatever became of the process that wrote it."""

import json
import os
import signal
import subprocess
import sys
import threading

import pytest

from tba import trace
from tba.contracts.errors import UserError
from tba.trace import Trace, merge, read_events


class Clock:
    now = 0

    def __call__(self):
        return self.now


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(trace.DIRECTORY, str(tmp_path))
    return tmp_path


def only_file(folder):
    (path,) = folder.glob("*.trace.json")
    return path


def test_without_the_variable_nothing_is_written_and_a_span_is_the_same_null_object(tmp_path, monkeypatch):
    monkeypatch.delenv(trace.DIRECTORY, raising=False)
    monkeypatch.chdir(tmp_path)
    with trace.recording("trainer"):
        assert trace.span("a") is trace.span("b", step=1)
        trace.began("reward", 1)
        trace.lay_out({"collate": 1.0})
    assert list(tmp_path.iterdir()) == []


def test_a_closed_file_is_json_of_complete_events_with_process_and_thread_names(folder):
    with trace.recording("searcher", "searcher-0"):
        with trace.span("outer", step=3), trace.span("inner"):
            pass
        thread = threading.Thread(target=lambda: trace.span("upload").__enter__(), name="spool")
        thread.start()
        thread.join()
        with trace.span("after"):
            pass
    path = only_file(folder)
    events = json.loads(path.read_text())
    assert path.name.startswith("searcher-0.")
    assert {e["args"]["name"] for e in events if e["ph"] == "M"} == {"searcher-0", "MainThread"}
    inner, outer = (next(e for e in events if e["name"] == name) for name in ("inner", "outer"))
    assert outer["args"] == {"step": 3} and outer["pid"] == os.getpid()
    assert outer["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + 0.002


def test_times_are_unix_time_in_microseconds(tmp_path):
    clock = Clock()
    made = Trace(tmp_path / "x", process="p", clock=clock, wall=lambda: 5_000_000_000)
    made.complete("a", 1_000_000, 3_500_000)
    made.close()
    event = read_events(tmp_path / "x")[-1]
    assert (event["ts"], event["dur"]) == (5_001_000.0, 2500.0)


def test_each_thread_has_a_track_by_its_name_so_that_a_thread_a_task_does_not_make_a_track_a_task(folder):
    def work():
        with trace.span("publish"):
            pass

    with trace.recording("trainer"):
        for _ in range(3):
            thread = threading.Thread(target=work, name="publish")
            thread.start()
            thread.join()
    assert len({e["tid"] for e in read_events(only_file(folder)) if e["name"] == "publish"}) == 1


def test_what_begins_in_one_thread_and_ends_in_another_is_one_asynchronous_event(folder):
    with trace.recording("searcher"):
        trace.began("reward", 7)
        thread = threading.Thread(target=trace.ended, args=("reward", 7), name="pool")
        thread.start()
        thread.join()
    begin, end = (e for e in read_events(only_file(folder)) if e["name"] == "reward")
    assert (begin["ph"], end["ph"]) == ("b", "e")
    assert (begin["id"], begin["cat"]) == (end["id"], end["cat"])


def test_parts_known_by_their_sums_lie_one_behind_the_other_and_end_now(folder):
    with trace.recording("trainer"):
        trace.lay_out({"collate": 0.25, "optimizer": 0.5})
    first, second = (e for e in read_events(only_file(folder)) if e["ph"] == "X")
    assert [first["name"], second["name"]] == ["collate (sum)", "optimizer (sum)"]
    assert (first["dur"], second["dur"]) == (250_000.0, 500_000.0)
    assert second["ts"] == pytest.approx(first["ts"] + first["dur"], abs=1.0)


def test_a_file_stops_at_its_bound_and_its_last_event_says_so(tmp_path):
    made = Trace(tmp_path / "x", process="p", max_bytes=2000)
    for number in range(1000):
        made.complete("a", number, number + 1)
    made.close()
    assert (tmp_path / "x").stat().st_size < 2500
    events = json.loads((tmp_path / "x").read_text())
    assert events[-1]["name"] == "trace ends here: file is full"
    assert 5 < sum(e["name"] == "a" for e in events) < 1000


def test_a_disk_that_fails_ends_the_trace_and_not_the_run(tmp_path):
    made = Trace(tmp_path / "x", process="p")
    os.close(made._file.fileno())
    made.complete("a", 0, 1)
    made.flush()
    made.complete("b", 0, 1)
    made.close()
    assert [e["name"] for e in read_events(tmp_path / "x")] == ["process_name"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of a fork beside threads: that is the point
def test_a_forked_child_leaves_its_parents_file_alone(folder):
    with trace.recording("trainer"):
        with trace.span("before"):
            pass
        child = os.fork()
        if child == 0:
            with trace.span("child"):
                pass
            os._exit(trace._active is not None)
        assert os.waitpid(child, 0)[1] == 0
    assert [e["name"] for e in read_events(only_file(folder)) if e["ph"] == "X"] == ["before"]


def test_a_directory_that_cannot_be_made_is_told_before_anything_begins(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(trace.DIRECTORY, str(tmp_path / "file" / "below"))
    with pytest.raises(UserError, match="TBA_TRACE must name a directory that can be written"):
        trace.recording("trainer").__enter__()


def test_a_file_cut_off_anywhere_gives_the_events_before_the_cut(tmp_path):
    made = Trace(tmp_path / "x", process="p")
    for number in range(20):
        made.complete(f"e{number}", number, number + 1)
    made.close()
    whole = (tmp_path / "x").read_bytes()
    for cut in range(0, len(whole), 37):
        (tmp_path / "cut").write_bytes(whole[:cut])
        names = [e["name"] for e in read_events(tmp_path / "cut") if e["ph"] == "X"]
        assert names == [f"e{i}" for i in range(len(names))]
    assert len(read_events(tmp_path / "x")) == 22  # 20, the process's name, the track's


def test_sigkill_leaves_a_readable_file(folder):
    program = (
        "import os, signal, time\n"
        "from tba import trace\n"
        "with trace.recording('trainer'):\n"
        "    for i in range(50):\n"
        "        with trace.span('step', step=i):\n"
        "            pass\n"
        "    trace._active.flush()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL
    path = only_file(folder)
    assert not path.read_text().rstrip().endswith("]")
    assert [e["args"]["step"] for e in read_events(path) if e["ph"] == "X"] == list(range(50))


def test_merged_processes_keep_apart_though_all_had_the_same_number(tmp_path):
    for name in ("a", "b"):
        Trace(tmp_path / f"{name}.trace.json", process=name).close()
    events = merge(list(tmp_path.glob("*.trace.json")))
    assert {e["args"]["name"]: e["pid"] for e in events} == {"a": 1, "b": 2}
