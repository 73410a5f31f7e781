"""Whole runs with searchers on the real vLLM: real processes, a real trainer that publishes while they generate."""

import signal

import numpy as np
import pytest
import torch
from support.processes import Cluster, cluster, job_for
from support.vllm_models import save_small

from tba.contracts.job import TBAJob
from tba.contracts.keys import RUN, WEIGHTS, WeightsKey
from tba.contracts.records import Outcome, RunRecord, RunState, Trajectory
from tba.models import build_model, load_weights
from tba.shards import decode_shard
from tba.snapshots import fetch_snapshot

TENSORS = 29  # of the model below, embeddings tied
pytestmark = pytest.mark.timeout(900)


def job(root, swap: str, **model) -> TBAJob:
    save_small(root / "small", tied=True)
    made = job_for(
        root,
        f"file://{root}/store",
        model={"uri": f"file://{root}/small", "maxModelLen": 64, **model},
        task={"sampling": {"maxTokens": 40}, "reward": {"name": "arithmetic"}},
        objective={"totalSteps": 20},
        buffer={"maxReplayRatio": 1.0},  # no end without rows of the second searcher
        sync={"swap": swap, "retainVersions": 50},
    ).model_dump(mode="json", by_alias=True)
    engine = {"type": "vllm", "maxNumSeqs": 16, "extraArgs": {"kv_cache_memory_bytes": 2**26, "logprobsShare": 0.5}}
    made["spec"]["searcher"]["engine"] = engine
    return TBAJob.model_validate(made)


def rows(run: Cluster) -> list[Trajectory]:
    run_id = RunRecord.model_validate_json(run.store.get(RUN).data).run_id
    batches = [decode_shard(run.store.get(key.path).data, run_id=run_id) for key in run.shards()]
    return [batch.row(i) for batch in batches for i in range(len(batch))]


def finish(run: Cluster) -> list[Trajectory]:
    """Rows of the whole run."""
    run.wait_for(lambda latest: latest.state is RunState.COMPLETE, timeout_seconds=400)
    return rows(run)


def test_a_searcher_killed_between_two_tensors_is_replaced_and_swaps_happen_within_responses(tmp_path):
    with cluster(tmp_path, job(tmp_path, "InFlight")) as run:
        trainer = run.trainer()
        first = run.searcher("searcher-0", f"engine.between_tensors=kill:{TENSORS + 10}")  # in its first swap
        assert first.wait(400) == -signal.SIGKILL, run.tail()
        before = len(rows(run))
        run.searcher("searcher-0")
        found = finish(run)
        assert trainer.wait(60) == 0
        assert len(found) > before
        assert all(row.outcome is not Outcome.FAILED for row in found)
        assert any(len(row.spans) > 1 for row in found)
        assert {row.sampler_logprobs is None for row in found} == {True, False}
        assert max(span.version for row in found for span in row.spans) > 1


def test_a_run_with_an_adapter_is_sampled_with_the_adapter_beside_its_base(tmp_path):
    lora = {"rank": 4, "alpha": 8.0, "targetModules": ["q_proj", "down_proj"]}
    with cluster(tmp_path, job(tmp_path, "InFlight", lora=lora)) as run:
        trainer = run.trainer()
        run.searcher()
        found = finish(run)
        assert trainer.wait(60) == 0
        assert "beside its base" in run.tail(10**6)
        assert all(row.outcome is not Outcome.FAILED for row in found)
        assert any(len(row.spans) > 1 for row in found) and len({s.version for row in found for s in row.spans}) > 2
        scored = [row for row in found if row.sampler_logprobs and len(row.spans) == 1 and row.policy.version]
        for row in scored[:5]:
            assert np.allclose(row.sampler_logprobs, logprobs(run, row), atol=1e-4)
        assert scored


@torch.no_grad()
def logprobs(run: Cluster, row: Trajectory) -> torch.Tensor:
    """Of a response under the published weights that it names, adapter and all."""
    keys = [info.key for info in run.store.list_after(WEIGHTS) if info.key.endswith("/manifest.json")]
    named = next(key for key in keys if WeightsKey.parse(key).version == row.policy.version)
    snapshot = fetch_snapshot(run.store, named)
    assert snapshot.manifest.encoding == "adapter" and snapshot.manifest.policy == row.policy
    model, _ = build_model(snapshot.assets, dtype=torch.float32, device="cpu")
    load_weights(model, snapshot.tensors)
    logits = model(torch.tensor([[*row.prompt_tokens, *row.response_tokens]])).logits[
        0, len(row.prompt_tokens) - 1 : -1
    ]
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(row.response_tokens)[:, None])[:, 0]


def test_between_batches_every_response_is_one_policys(tmp_path):
    with cluster(tmp_path, job(tmp_path, "BetweenBatches")) as run:
        run.trainer()
        searcher = run.searcher()
        found = finish(run)
        assert all(len(row.spans) == 1 for row in found)
        assert len({row.spans[0].version for row in found}) > 2
        assert run.stop(searcher) == [143], run.tail()
