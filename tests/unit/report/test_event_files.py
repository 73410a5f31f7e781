"""Event files as TensorBoard reads them: what is written once, replaced and forgotten."""

import struct

import pytest
from support.synthetic_run import evaluation, event, sample, step_row, whole_run
from tensorboardX.proto.event_pb2 import Event, SessionLog

from tba.report.event_files import EventFiles
from tba.report.history import assemble


def events(directory):
    """Of all files in the order in which TensorBoard reads them."""
    found = []
    for path in sorted(directory.glob("events.out.tfevents.*")):
        data, at = path.read_bytes(), 0
        while at < len(data):  # length, its check, an event, its check
            (length,) = struct.unpack_from("<Q", data, at)
            found.append(Event.FromString(data[at + 12 : at + 12 + length]))
            at += 16 + length
    return found


def shown(directory):
    """Tag -> step -> value, after what TensorBoard forgets at the start of a session."""
    values = {}
    for one in events(directory):
        if one.session_log.status == SessionLog.START:
            values = {tag: {s: v for s, v in curve.items() if s < one.step} for tag, curve in values.items()}
        for value in one.summary.value:
            values.setdefault(value.tag, {})[one.step] = value
    return values


def written(directory, *histories):
    files = EventFiles(directory)
    counts = [files.write(history) for history in histories]
    files.close()
    return counts


def test_every_number_of_a_step_is_a_curve_at_the_step_and_time_of_its_row(tmp_path):
    written(tmp_path, assemble(whole_run(20)))
    found = shown(tmp_path)
    assert found["step/rewardMean"][7].simple_value == pytest.approx(step_row(7).reward_mean)
    assert sorted(found["step/loss"]) == list(range(1, 21)) and "step/phaseSeconds/forward_backward" in found
    assert sorted(found["publish/totalBytes"]) == list(range(0, 21, 2)) and len(found["eval/passAt1"]) > 5
    times = {
        one.step: one.wall_time for one in events(tmp_path) if any(v.tag == "step/loss" for v in one.summary.value)
    }
    assert times[20] == step_row(20).time


def test_staleness_is_a_histogram_of_rows_by_steps(tmp_path):
    written(tmp_path, assemble([step_row(9, staleness={2: 5, 4: 1})]))
    histogram = shown(tmp_path)["step/staleness"][9].histo
    assert (histogram.num, histogram.sum, histogram.sum_squares) == (6, 14, 36)
    assert list(histogram.bucket_limit) == [2.5, 3.5, 4.5] and list(histogram.bucket) == [5, 0, 1]


def test_samples_can_be_read(tmp_path):
    written(tmp_path, assemble([sample(6, 0.5, "9\n<b>")]))
    (text,) = shown(tmp_path)["sample/text_summary"][6].tensor.string_val
    assert text.decode().startswith("**reward 0.5**, version 6, s-0") and "    9\n    <b>" in text.decode()


def test_a_second_look_adds_only_what_is_new_late_evaluations_too(tmp_path):
    early = [step_row(s) for s in range(1, 11)]
    late = [*early, *(step_row(s) for s in range(11, 14)), evaluation(5)]
    assert written(tmp_path, assemble(early), assemble(late), assemble(late)) == [10, 4, 0]
    assert sorted(shown(tmp_path)["step/loss"]) == list(range(1, 14)) and 5 in shown(tmp_path)["eval/passAt1"]


def test_steps_that_a_resume_discards_while_it_follows_are_forgotten(tmp_path):
    before = [event("started"), *(step_row(s, loss=1.0) for s in range(1, 13))]
    after = [*before, event("resumed", epoch=2, step=8), step_row(9, epoch=2, loss=2.0)]
    written(tmp_path, assemble(before), assemble(after))
    curve = {step: value.simple_value for step, value in shown(tmp_path)["step/loss"].items()}
    assert curve == {**dict.fromkeys(range(1, 9), 1.0), 9: 2.0}


def test_another_call_replaces_its_files_and_nothing_else(tmp_path):
    (tmp_path / "events.out.tfevents.1.host").write_bytes(b"")
    written(tmp_path, assemble(whole_run(20)))
    written(tmp_path, assemble([step_row(1)]))
    assert list(shown(tmp_path)["step/loss"]) == [1]
    assert (tmp_path / "events.out.tfevents.1.host").exists()
