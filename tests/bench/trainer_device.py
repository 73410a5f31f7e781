"""Our trainer step on one device with a given model: time, tokens, memory, phases, model FLOPs. For bench_trainer.

The batch: P groups of K rows, one prompt a group, response lengths uniform from 1 to the greatest: the mean is half of
it (quality.md §4). With `--prompt 1` nothing is worth sharing: what remains is packing alone.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from tba.contracts.config import LiveConfig, RunConfig
from tba.contracts.keys import ShardKey
from tba.contracts.records import FinishReason, Outcome, ShardHeader, Span, Trajectory
from tba.protocol.bookkeeping import Bookkeeping
from tba.shards.batch import ShardBatch, from_rows
from tba.trainer.learner import Learner, StepResult
from tba.trainer.model import Policy
from tba.trainer.work import StepWork


def add_options(parser: argparse.ArgumentParser) -> None:
    """Of this measurement."""
    group = parser.add_argument_group("one device (with --model)")
    group.add_argument("--model", type=Path, help="directory with config.json and *.safetensors")
    group.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    group.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    group.add_argument("--tokens", type=int, default=65536, help="prompt and response tokens of all rows of a batch")
    group.add_argument("--responses", type=int, default=16, help="K")
    group.add_argument("--prompt", type=int, default=72, help="tokens of each prompt")
    group.add_argument("--max-response", type=int, default=256, help="greatest response, tokens")
    group.add_argument("--micro-batch-tokens", type=int, default=65536)
    group.add_argument("--checkpointing", choices=["Auto", "Always", "Selective", "Never"], default="Never")
    group.add_argument("--compile", action="store_true")
    group.add_argument("--offload-reference", action="store_true")
    group.add_argument("--steps", type=int, default=8, help="measured, after two that are not")


def measure(options: argparse.Namespace) -> dict[str, object]:
    """Everything about one configuration, ready for JSON."""
    device = torch.device(options.device)
    learner, live = _learner(options, device)
    for _ in range(2):
        _step(learner, live, device, score=True)
    learner.optimizer.zero_grad()
    static = torch.cuda.memory_allocated(device) if device.type == "cuda" else None
    found: dict[str, object] = {}
    for what, score in (("reference cached", False), ("reference scored", True)):
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        times, results = zip(*(_step(learner, live, device, score=score) for _ in range(options.steps)), strict=True)
        found[what] = _summary(learner, list(times), list(results))
        if device.type == "cuda":
            learner.optimizer.zero_grad()
            found[f"peak minus static bytes, {what}"] = torch.cuda.max_memory_allocated(device) - (static or 0)
    gradients = 4 * sum(p.numel() for p in learner.policy.model.parameters())
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "model": options.model.name,
        "settings": {n: str(v) for n, v in vars(options).items() if n in _SETTINGS},
        "layout": learner.policy.scorer.layout,
        "refused": learner.policy.scorer.refused,
        "static bytes": static,
        "gradient bytes, part of the peak": gradients,
        **found,
    }


_SETTINGS = (
    "dtype", "tokens", "responses", "prompt", "max_response", "micro_batch_tokens", "checkpointing", "compile",
    "offload_reference", "steps",
)  # fmt: skip


def _step(learner: Learner, live: LiveConfig, device: torch.device, *, score: bool) -> tuple[float, StepResult]:
    if score:
        learner.buffer.set_reference(f"bench {learner.step}")  # forgets what was cached
    started = time.perf_counter()
    result = learner.train_step(live, epoch=1)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started, result


def _summary(learner: Learner, times: list[float], results: list[StepResult]) -> dict[str, object]:
    seconds = statistics.median(times)
    last = results[-1]
    work = StepWork(learner)
    flops = work.flops(last)
    return {
        "seconds": seconds,
        "min": min(times),
        "max": max(times),
        "row tokens/s": last.row_tokens / seconds,
        "computed tokens/s": last.trained_tokens / seconds,
        "row tokens": last.row_tokens,
        "computed tokens": last.trained_tokens,
        "scored tokens": last.scored_tokens,
        "phase seconds": {p: statistics.median(r.phase_seconds[p] for r in results) for p in last.phase_seconds},
        "model flops": flops,
        "mfu": flops / seconds / work.peak_flops if flops and work.peak_flops else None,
    }


def _learner(options: argparse.Namespace, device: torch.device) -> tuple[Learner, LiveConfig]:
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32, local_files_only=True).to(device)
    mean = options.prompt + (1 + options.max_response) / 2
    prompts = max(1, round(options.tokens / mean / options.responses))
    config = RunConfig.model_validate(
        {
            "model": {"uri": "file:///none", "dtype": options.dtype},
            "task": {"prompts": {"uri": "file:///none"}, "reward": {"name": "fake"}},
            "objective": {
                "responsesPerPrompt": options.responses,
                "promptsPerBatch": prompts,
                "learningRate": 1e-6,
                "schedule": {"warmupSteps": 0},
                "optimizer": {"maxGradNorm": 1.0},
            },
            "buffer": {"minInitialTrajectories": 0, "onPolicyProbability": 1.0, "deduplicate": False},
        }
    )
    live = LiveConfig.model_validate(
        {
            "storage": {"uri": "file:///none"},
            "buffer": {"maxReplayRatio": None},
            "trainer": {
                "microBatchTokens": options.micro_batch_tokens,
                "activationCheckpointing": options.checkpointing,
                "compile": options.compile,
                "offloadReference": options.offload_reference,
            },
        }
    )
    objective = config.objective
    policy = Policy(model, config=config.model, reference=objective.reference, temperature=objective.temperature)
    learner = Learner(policy, config)
    shard = _shard(options, prompts, int(model.get_input_embeddings().weight.shape[0]))
    key = ShardKey(1, shard.header.searcher, shard.header.incarnation, shard.header.seq)
    learner.ingest_shard(key.path, shard, Bookkeeping.begun(1))
    return learner, live


def _shard(options: argparse.Namespace, prompts: int, vocabulary: int) -> ShardBatch:
    rng = np.random.default_rng(0)
    lengths = np.linspace(1, options.max_response, prompts * options.responses).round().astype(int)
    rng.shuffle(lengths)
    rows = []
    for i, length in enumerate(lengths.tolist()):
        prompt = i // options.responses
        rows.append(
            Trajectory(
                prompt_id=prompt,
                visit=prompt,
                visit_size=options.responses,
                prompt_tokens=np.random.default_rng(prompt).integers(0, vocabulary, options.prompt).tolist(),
                response_tokens=rng.integers(0, vocabulary, length).tolist(),
                outcome=Outcome.SCORED,
                reward=float(rng.integers(0, 2)),
                finish_reason=FinishReason.STOP,
                spans=[Span(length, 1, 0)],
                temperature=1.0,
                created_at=0.0,
            )
        )
    header = ShardHeader(run="f" * 32, searcher="searcher-0", incarnation="a" * 32, seq=0, reward_version="bench")
    return from_rows(header, rows)


def report(options: argparse.Namespace) -> None:
    """Measure and print as JSON."""
    print(json.dumps(measure(options), indent=1))
