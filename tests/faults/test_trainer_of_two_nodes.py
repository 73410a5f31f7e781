"""`tba trainer` on two nodes as processes: they wait for each other, end together and resume."""

import socket
import time

import pytest
from support.audit import audit
from support.processes import cluster, job_for

from tba.contracts.errors import LeftAlone, RanksMissing, UserError
from tba.contracts.keys import CheckpointKey
from tba.contracts.records import RunState

STOPPED = 143


@pytest.fixture
def place():
    """Environment variables of a node, without its number."""
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    return {
        "TBA_TRAINER_NODES": "2",
        "TBA_RENDEZVOUS": f"127.0.0.2:{port}",
        "TBA_RENDEZVOUS_TOKEN": "of the test",
        "TBA_RENDEZVOUS_SECONDS": "90",
    }


def other(place: dict[str, str], **changes: str) -> dict[str, str]:
    return {**place, "TBA_TRAINER_NODE_RANK": "1", **changes}


def logged(run, process, text: str) -> None:
    deadline = time.monotonic() + 60
    while text not in run.log_of(process):
        assert process.poll() is None and time.monotonic() < deadline, run.tail()
        time.sleep(0.1)


def test_a_drained_node_ends_both_with_a_checkpoint_and_the_run_goes_on_and_completes(tmp_path, place):
    job = job_for(
        tmp_path,
        f"file://{tmp_path}/store",
        objective={"totalSteps": 60},
        storage={"checkpoints": {"everySteps": 1000}},
    )
    with cluster(tmp_path, job) as run:
        run.searcher()
        first = run.trainer(**place)
        logged(run, first, '"event": "nodes_awaited"')  # the other is late
        second = run.trainer(**other(place))
        run.wait_for(lambda latest: latest.step >= 5)
        assert run.stop(second) == [STOPPED], run.tail()
        assert first.wait(30) == STOPPED, run.tail()
        latest = run.latest()
        assert latest.step >= 5 and CheckpointKey.parse(latest.checkpoint).step == latest.step

        second, first = run.trainer(**other(place)), run.trainer(**place)  # now the other comes first
        assert (first.wait(240), second.wait(30)) == (0, 0), run.tail()
        latest = run.latest()
        assert (latest.state, latest.step, latest.epoch) == (RunState.COMPLETE, 60, 2)
        assert audit(run.store).doubled == set()


def test_a_node_that_never_comes_ends_rank_0_with_a_told_error(tmp_path, place):
    with cluster(tmp_path, job_for(tmp_path, f"file://{tmp_path}/store")) as run:
        trainer = run.trainer(**place | {"TBA_RENDEZVOUS_SECONDS": "1"})
        assert trainer.wait(60) == RanksMissing.exit_code
        assert "error: trainer nodes [1] of 2 did not come within 1 s" in run.log_of(trainer)


def test_rank_0_that_never_comes_ends_a_node_with_a_told_error_that_does_not_count(tmp_path, place):
    with cluster(tmp_path, job_for(tmp_path, f"file://{tmp_path}/store")) as run:
        node = run.trainer(**other(place, TBA_RENDEZVOUS_SECONDS="1"))
        assert node.wait(60) == LeftAlone.exit_code
        assert "error: trainer node 0 did not come to 127.0.0.2" in run.log_of(node)


def test_sigterm_ends_nodes_that_wait_for_each_other_at_once(tmp_path, place):
    with cluster(tmp_path, job_for(tmp_path, f"file://{tmp_path}/store")) as run:
        trainer = run.trainer(**place | {"TBA_TRAINER_NODES": "3"})
        node = run.trainer(**other(place, TBA_TRAINER_NODES="3"))
        logged(run, trainer, '"event": "node_joined"')
        assert run.stop(node, trainer, within_seconds=10) == [STOPPED, STOPPED], run.tail()


@pytest.mark.parametrize("mistake", [{"TBA_TRAINER_RANKS": "2"}, {"TBA_TRAINER_NODES": "3"}])
def test_nodes_that_were_started_differently_end_both_with_64(tmp_path, place, mistake):
    with cluster(tmp_path, job_for(tmp_path, f"file://{tmp_path}/store")) as run:
        trainer, node = run.trainer(**place), run.trainer(**other(place, **mistake))
        assert (trainer.wait(60), node.wait(60)) == (UserError.exit_code, UserError.exit_code), run.tail()
        assert "give all the same --nodes and --ranks" in run.log_of(trainer)


def test_a_node_with_another_token_is_refused_and_said_so_on_both(tmp_path, place):
    with cluster(tmp_path, job_for(tmp_path, f"file://{tmp_path}/store")) as run:
        trainer = run.trainer(**place)
        logged(run, trainer, '"event": "nodes_awaited"')
        node = run.trainer(**other(place, TBA_RENDEZVOUS_TOKEN="another", TBA_RENDEZVOUS_SECONDS="1"))
        assert node.wait(60) == LeftAlone.exit_code
        assert trainer.poll() is None
        assert "has another token" in run.log_of(trainer) and '"event": "node_refused"' in run.log_of(trainer)


@pytest.mark.parametrize("missing", ["TBA_RENDEZVOUS", "TBA_RENDEZVOUS_TOKEN"])
def test_nodes_without_a_place_or_a_token_to_meet_are_the_users_mistake(tmp_path, place, missing):
    with cluster(tmp_path, job_for(tmp_path, f"file://{tmp_path}/store")) as run:
        node = run.trainer(**other(place, **{missing: ""}))
        assert node.wait(60) == UserError.exit_code
        assert "with --nodes above 1" in run.log_of(node)
