"""`tba trainer --ranks 2` as a process: it survives the loss of a rank and SIGTERM, and completes its run."""

import os
import signal
import socket

import torch
from support.audit import audit
from support.pids import children_of, wait_until_gone
from support.processes import cluster, job_for

from tba.contracts.keys import CheckpointKey
from tba.contracts.records import RunState
from tba.snapshots.fetch import fetch_snapshot
from tba.snapshots.manifest import read_chain


def test_a_run_of_two_ranks_goes_on_after_a_killed_rank_and_after_sigterm_and_completes_with_one(tmp_path):
    job = job_for(tmp_path, f"file://{tmp_path}/store", objective={"totalSteps": 80})
    with cluster(tmp_path, job) as run:
        searcher = run.searcher()
        first = run.trainer(TBA_TRAINER_RANKS="2")
        run.wait_for(lambda latest: latest.checkpoint is not None and CheckpointKey.parse(latest.checkpoint).step >= 5)
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


def test_ranks_that_torchrun_started_leave_in_order_after_sigterm(tmp_path):
    job = job_for(tmp_path, f"file://{tmp_path}/store")
    with socket.create_server(("127.0.0.1", 0)) as free:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
    with cluster(tmp_path, job) as run:
        run.searcher()
        trainer, other = (run.trainer(**place, RANK=rank, LOCAL_RANK=rank) for rank in ("0", "1"))
        run.wait_for(lambda latest: latest.step >= 2)
        assert run.stop(trainer) == [143], run.tail()
        assert other.wait(30) == 0, run.tail()


def test_an_adapter_trained_by_two_ranks_goes_on_after_sigterm_and_completes_with_one(tmp_path):
    lora = {"rank": 4, "targetModules": ["q_proj", "v_proj"]}
    job = job_for(tmp_path, f"file://{tmp_path}/store", objective={"totalSteps": 30}, model={"lora": lora})
    with cluster(tmp_path, job) as run:
        run.searcher()
        first = run.trainer(TBA_TRAINER_RANKS="2")
        run.wait_for(lambda latest: latest.step >= 6)
        assert run.stop(first) == [143], run.tail()
        last = run.trainer()
        assert last.wait(240) == 0, run.tail()
        latest = run.latest()
        assert (latest.state, latest.step, latest.epoch) == (RunState.COMPLETE, 30, 2)
        newest, before = (fetch_snapshot(run.store, key) for key in adapter_and_base(run.store, latest.manifest))
        changed = {name for name, tensor in newest.tensors.items() if not torch.equal(tensor, before.tensors[name])}
        assert changed and all("q_proj" in name or "v_proj" in name for name in changed)


def adapter_and_base(store, key: str) -> tuple[str, str]:
    """The snapshot, which is an adapter alone, and the one whose weights it goes on."""
    base, newest = read_chain(store, key)
    assert newest.manifest.encoding == "adapter"
    return newest.key, base.key
