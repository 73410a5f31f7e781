"""examples/count.yaml: its start maker, prompts, reward and settings, with a tiny model in place of the real one."""

import itertools
import multiprocessing

import torch
from bench.gpu.average import Ranks
from bench.gpu.places import JOB, tiny_start
from support.processes import cluster

from tba.cli.jobfile import load_job
from tba.cli.local_run import free_port
from tba.contracts.records import RunState
from tba.report.history import read_history

SMALL = [
    "model.dtype=float32",
    "objective.totalSteps=3",
    "objective.promptsPerBatch=4",
    "objective.responsesPerPrompt=4",
    "searcher.samplesPerPrompt=4",
    "searcher.engine={type: transformers, maxNumSeqs: 32}",
    "buffer.minInitialTrajectories=16",
    "task.sampling.maxTokens=8",
    "task.evaluation.maxPrompts=4",
    "task.evaluation.everySteps=3",
]


def test_the_job_trains_on_what_its_start_maker_made(tmp_path):
    start = tiny_start(tmp_path / "start")
    places = [
        f"model.uri=file://{start / 'start'}",
        f"task.prompts.uri=file://{start / 'train.jsonl'}",
        f"task.evaluation.prompts.uri=file://{start / 'test.jsonl'}",
        f"storage.uri=file://{tmp_path / 'store'}",
    ]
    with cluster(tmp_path, load_job(JOB, [*places, *SMALL])) as run:
        run.searcher()
        assert run.trainer().wait(120) == 0, run.tail()
        latest = run.latest()
        assert latest is not None and latest.state is RunState.COMPLETE and latest.step == 3
        history = read_history(run.store)
        assert [e.step for e in history.evaluations][-1] == 3
        assert max(itertools.chain(*(r.staleness for r in history.steps))) <= 8
        assert all(r.replay_ratio <= 1.0 for r in history.steps), "each response is trained once"


def _average(rank: int, port: int, results) -> None:
    ranks = Ranks(rank, 2, port, torch.device("cpu"))
    tensors = [torch.full((3, 2), float(rank)), torch.arange(4.0) * (rank + 1)]
    ranks.average(tensors)
    results.put((rank, [t.tolist() for t in tensors], ranks.total(rank + 1.0)))
    ranks.wait()


def test_two_ranks_average_tensors_and_share_sums():
    context = multiprocessing.get_context("spawn")
    results, port = context.Queue(), free_port()
    children = [context.Process(target=_average, args=(rank, port, results)) for rank in range(2)]
    for child in children:
        child.start()
    found = sorted(results.get(timeout=120) for _ in children)
    for child in children:
        child.join(30)
    expected = [torch.full((3, 2), 0.5).tolist(), (torch.arange(4.0) * 1.5).tolist()]
    assert [tensors for _, tensors, _ in found] == [expected, expected]
    assert [total for _, _, total in found] == [3.0, 3.0]
