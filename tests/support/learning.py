"""A small real learner and shards to feed it: shared by trainer tests."""

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tba.contracts.config import LiveConfig, RunConfig
from tba.contracts.keys import ShardKey
from tba.contracts.records import FinishReason, Outcome, ShardHeader, Span, Trajectory
from tba.protocol.bookkeeping import Bookkeeping
from tba.shards.batch import ShardBatch, from_rows
from tba.trainer.adapted import make_policy
from tba.trainer.learner import Learner

INCARNATION = "a" * 32
RUN = "f" * 32


def run_config(**objective) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"uri": "file:///none", "dtype": "float32", "maxModelLen": 64},
            "task": {
                "prompts": {"uri": "file:///none.jsonl"},
                "reward": {"name": "fake"},
                "sampling": {"maxTokens": 16},
            },
            "objective": {
                "responsesPerPrompt": 4,
                "promptsPerBatch": 3,
                "totalSteps": 20,
                "learningRate": 1e-3,
                "schedule": {"warmupSteps": 0},
                "beta": 0.1,
                **objective,
            },
            "buffer": {"minInitialTrajectories": 0, "sampling": "Uniform", "maxReplayRatio": None},
        }
    )


def live_config(*, micro_batch_tokens: int = 4096, **sync) -> LiveConfig:
    return LiveConfig.model_validate(
        {
            "storage": {"uri": "file:///none"},
            "trainer": {"microBatchTokens": micro_batch_tokens},
            "buffer": {"maxReplayRatio": None},
            "sync": sync,
        }
    )


def tiny_llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
    )
    return LlamaForCausalLM(config)


def make_learner(config: RunConfig | None = None, *, seed: int = 0, policy=make_policy) -> Learner:
    torch.manual_seed(seed)
    config = config or run_config()
    objective = config.objective
    return Learner(
        policy(tiny_llama(), config=config.model, reference=objective.reference, temperature=objective.temperature),
        config,
    )


def make_shard(seq: int, *, prompts=(0, 1, 2, 3), samples: int = 6, version: int = 0, seed: int = 0) -> ShardBatch:
    """One visit a prompt, `samples` responses each, lengths 1..8, rewards 0 or 1."""
    rng = np.random.default_rng([seed, seq])
    rows = [
        Trajectory(
            prompt_id=prompt,
            visit=seq * 1000 + i,
            visit_size=samples,
            prompt_tokens=[1 + prompt, 2, 3],
            response_tokens=(tokens := rng.integers(4, 30, size=int(rng.integers(1, 9))).tolist()),
            outcome=Outcome.SCORED,
            reward=float(rng.integers(0, 2)),
            finish_reason=FinishReason.STOP,
            spans=[Span(len(tokens), 1, version)],
            temperature=1.0,
            created_at=0.0,
        )
        for i, prompt in enumerate(prompts)
        for _ in range(samples)
    ]
    header = ShardHeader(run=RUN, searcher="searcher-0", incarnation=INCARNATION, seq=seq, reward_version="v")
    return from_rows(header, rows)


def feed(learner: Learner, *shards: ShardBatch, book: Bookkeeping | None = None) -> None:
    book = book or Bookkeeping.begun(1)
    for shard in shards:
        path = ShardKey(1, shard.header.searcher, shard.header.incarnation, shard.header.seq).path
        learner.ingest_shard(path, shard, book)
