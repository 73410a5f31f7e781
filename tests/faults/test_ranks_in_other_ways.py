"""Trainers of two ranks as processes: started by torchrun, and with an adapter."""

import socket

import torch
from support.processes import cluster, job_for

from tba.contracts.records import RunState
from tba.snapshots.fetch import fetch_snapshot
from tba.snapshots.manifest import read_chain


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
