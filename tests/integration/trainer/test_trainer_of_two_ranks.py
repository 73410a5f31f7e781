"""`tba trainer --ranks 2` as a process: it survives the loss of a rank and SIGTERM, and completes its run."""

import os
import signal

from support.audit import audit
from support.pids import children_of, wait_until_gone
from support.processes import cluster, job_for

from tba.contracts.keys import CheckpointKey
from tba.contracts.records import RunState
from tba.snapshots import fetch_manifest


def test_a_run_of_two_ranks_goes_on_after_a_killed_rank_and_after_sigterm_and_completes_with_one(tmp_path):
    job = job_for(tmp_path, f"file://{tmp_path}/store", objective={"totalSteps": 80})
    with cluster(tmp_path, job) as run:
        searcher = run.searcher()
        first = run.trainer(TBA_TRAINER_RANKS="2")
        run.wait_for(lambda latest: latest.checkpoint is not None and CheckpointKey.parse(latest.checkpoint).step >= 5)
        manifest = fetch_manifest(run.store, str(run.latest().manifest))
        assert {file.name.split("-")[1] for file in manifest.files} == {"rank00000", "rank00001"}
        (rank,) = children_of(first.pid)
        os.kill(rank, signal.SIGKILL)
        assert first.wait(30) == 1, run.tail()
        assert '"event": "rank_ended"' in run.tail(40) and "SIGKILL" in run.tail(40)

        second = run.trainer(TBA_TRAINER_RANKS="2")
        step = run.latest().step
        run.wait_for(lambda latest: latest.epoch == 2 and latest.step >= step + 4)
        (rank,) = children_of(second.pid)
        assert run.stop(second) == [143], run.tail()
        wait_until_gone(rank)
        run.stop(searcher)  # or rows come after the last look
        last = run.trainer()
        assert last.wait(240) == 0, run.tail()
        latest = run.latest()
        assert (latest.state, latest.step, latest.epoch) == (RunState.COMPLETE, 80, 3)
        result = audit(run.store)
        assert result.lost == set() and result.doubled == set()
