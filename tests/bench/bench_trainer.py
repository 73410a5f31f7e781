"""Trainer tokens a second and peak memory of our step, against a plain transformers loop on the same batch.

The plain loop pads all rows to one length, takes `model(**batch).logits`, a full log_softmax, the same loss and AdamW.
Both arms train the same rows in the same process, turn by turn; memory is measured in a process of its own for each.

python tests/bench/bench_trainer.py [--quick]
python tests/bench/bench_trainer.py --model DIR --device cuda --tokens 65536 [--compile] …    our step on a GPU, as JSON
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import trainer_device
from results import Row, record, table, write
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from tba.contracts.config import LiveConfig, RunConfig
from tba.contracts.keys import ShardKey
from tba.contracts.records import FinishReason, Outcome, ShardHeader, Span, Trajectory
from tba.objectives.trajectory_balance import trajectory_balance
from tba.protocol.bookkeeping import Bookkeeping
from tba.shards.batch import ShardBatch, from_rows
from tba.trainer.learner import Learner
from tba.trainer.model import Policy

BETA = 0.1
LEARNING_RATE = 1e-4
OUTPUT = Path(__file__).resolve().parents[2] / "docs" / "results" / "trainer.json"


@dataclass(frozen=True, slots=True)
class Shape:
    """A model and a batch."""

    hidden: int
    layers: int
    vocabulary: int
    prompts: int  # P
    responses: int  # K
    prompt_tokens: int
    max_response_tokens: int

    @property
    def words(self) -> str:
        """For the note of a row."""
        return (
            f"d{self.hidden} x {self.layers}, vocabulary {self.vocabulary}, {self.prompts} x {self.responses} rows of "
            f"{self.prompt_tokens} + 1..{self.max_response_tokens} tokens"
        )


SHAPES = {
    "small": Shape(128, 4, 14, prompts=7, responses=20, prompt_tokens=12, max_response_tokens=64),
    "vocabulary": Shape(256, 4, 49152, prompts=3, responses=6, prompt_tokens=24, max_response_tokens=64),
}
QUICK = {
    "small": Shape(128, 4, 14, prompts=4, responses=8, prompt_tokens=12, max_response_tokens=48),
    "vocabulary": Shape(64, 2, 49152, prompts=2, responses=4, prompt_tokens=16, max_response_tokens=32),
}


def make_model(shape: Shape) -> LlamaForCausalLM:
    """Random weights, the same for each call."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=3 * shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)


def make_shard(shape: Shape) -> ShardBatch:
    """One visit of K responses to each of P prompts, long-tailed lengths: a few reach the limit, half are short."""
    rng = np.random.default_rng(0)
    rows = []
    for prompt in range(shape.prompts):
        prompt_tokens = rng.integers(0, shape.vocabulary, shape.prompt_tokens).tolist()
        for _ in range(shape.responses):
            length = int(
                np.clip(rng.lognormal(np.log(0.3 * shape.max_response_tokens), 0.8), 1, shape.max_response_tokens)
            )
            rows.append(
                Trajectory(
                    prompt_id=prompt,
                    visit=prompt,
                    visit_size=shape.responses,
                    prompt_tokens=prompt_tokens,
                    response_tokens=rng.integers(0, shape.vocabulary, length).tolist(),
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


class Ours:
    """The real learner; its sampler draws exactly the shard's rows in every step."""

    def __init__(self, shape: Shape) -> None:
        config = RunConfig.model_validate(
            {
                "model": {"uri": "file:///none", "dtype": "float32"},
                "task": {"prompts": {"uri": "file:///none"}, "reward": {"name": "fake"}},
                "objective": {
                    "responsesPerPrompt": shape.responses,
                    "promptsPerBatch": shape.prompts,
                    "learningRate": LEARNING_RATE,
                    "schedule": {"warmupSteps": 0},
                    "optimizer": {"maxGradNorm": None},
                    "beta": BETA,
                },
                # Equal responses stay apart, so that both arms train the same number of rows.
                "buffer": {"minInitialTrajectories": 0, "onPolicyProbability": 1.0, "deduplicate": False},
            }
        )
        self.live = LiveConfig.model_validate({"storage": {"uri": "file:///none"}, "buffer": {"maxReplayRatio": None}})
        objective = config.objective
        policy = Policy(
            make_model(shape), config=config.model, reference=objective.reference, temperature=objective.temperature
        )
        self.learner = Learner(policy, config)
        shard = make_shard(shape)
        path = ShardKey(1, shard.header.searcher, shard.header.incarnation, shard.header.seq).path
        self.learner.ingest_shard(path, shard, Bookkeeping.begun(1))
        self._references = 0

    def step(self, *, score: bool) -> float:
        """One optimizer step; returns the loss. `score`: with the reference's log-probabilities of all rows."""
        if score:
            self._references += 1
            self.learner.buffer.set_reference(f"bench {self._references}")  # forgets what was cached
        return self.learner.train_step(self.live, epoch=1).loss


class Plain:
    """What a straightforward script does."""

    def __init__(self, shape: Shape) -> None:
        self.model = make_model(shape).eval()
        self.reference = make_model(shape).eval().requires_grad_(False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
        shard = make_shard(shape)
        self.group = (shape.prompts, shape.responses)
        self.rewards = torch.from_numpy(shard.rewards).reshape(self.group)
        rows = [shard.row(i) for i in range(len(shard))]
        length = max(len(r.prompt_tokens) + len(r.response_tokens) for r in rows)
        self.input_ids = torch.zeros((len(rows), length), dtype=torch.int64)
        self.attention_mask = torch.zeros_like(self.input_ids)
        self.response_mask = torch.zeros((len(rows), length - 1))
        for i, row in enumerate(rows):
            start, end = len(row.prompt_tokens), len(row.prompt_tokens) + len(row.response_tokens)
            self.input_ids[i, :end] = torch.tensor([*row.prompt_tokens, *row.response_tokens])
            self.attention_mask[i, :end] = 1
            self.response_mask[i, start - 1 : end - 1] = 1.0
        self._cached: Tensor | None = None

    def step(self, *, score: bool) -> float:
        """As `Ours.step`."""
        if score or self._cached is None:
            with torch.no_grad():
                self._cached = self.logprobs(self.reference)
        self.optimizer.zero_grad()
        loss = trajectory_balance(self.logprobs(self.model), self._cached, self.rewards, beta=BETA).loss
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def logprobs(self, model: LlamaForCausalLM) -> Tensor:
        """Summed over response tokens, (P, K)."""
        batch = {"input_ids": self.input_ids, "attention_mask": self.attention_mask, "use_cache": False}
        logprobs = model(**batch).logits[:, :-1].log_softmax(-1)
        taken = logprobs.gather(-1, self.input_ids[:, 1:, None]).squeeze(-1)
        return (taken * self.response_mask).sum(-1).reshape(self.group)


ARMS: dict[str, Callable[[Shape], Ours | Plain]] = {"ours": Ours, "plain": Plain}


def seconds(action: Callable[[], object]) -> float:
    """Processor seconds of one call: the work, whatever else the machine does."""
    start = time.process_time()
    action()
    return time.process_time() - start


def time_arms(shape: Shape, repetitions: int) -> dict[tuple[str, bool], list[float]]:
    """(arm, with reference scoring) -> seconds of each step, arms turn by turn."""
    arms = {name: make(shape) for name, make in ARMS.items()}
    losses = {name: arm.step(score=True) for name, arm in arms.items()}  # warms up
    if abs(losses["ours"] - losses["plain"]) > 1e-4 * max(1.0, abs(losses["plain"])):
        raise RuntimeError(f"the arms must compute the same loss, got {losses}: their times cannot be compared")
    found: dict[tuple[str, bool], list[float]] = {(name, score): [] for name in arms for score in (False, True)}
    for i in range(repetitions):
        for score in (False, True):
            for name in sorted(arms, reverse=i % 2 == 0):
                found[name, score].append(seconds(lambda arm=arms[name], score=score: arm.step(score=score)))
    return found


def peak_bytes(shape: Shape, arm: str) -> int:
    """Most resident memory of two steps above that of the loaded arm. For a process that does nothing else. Linux."""
    running = ARMS[arm](shape)
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before = _status("VmRSS")
    for _ in range(2):
        running.step(score=True)
    return _status("VmHWM") - before


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def peak_in_child(options: argparse.Namespace, shape: str, arm: str) -> int:
    """`peak_bytes` in a process of its own."""
    command = [sys.executable, __file__, "--peak-of", arm, "--shape", shape, "--threads", str(options.threads)]
    command += ["--quick"] if options.quick else []
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def measure(options: argparse.Namespace, name: str, shape: Shape) -> list[Row]:
    """All rows of one shape."""
    tokens = int(np.diff(make_shard(shape).response_offsets).sum())
    times = time_arms(shape, options.repetitions)
    found = []
    for score, what in ((False, "step, reference cached"), (True, "step with reference scoring")):
        ours, plain = ([tokens / s for s in times[arm, score]] for arm in ("ours", "plain"))
        found.append(
            record(
                "perf",
                "trainer",
                f"{name}: {what}",
                statistics.median(ours),
                "response tokens/s",
                baseline=("plain transformers loop", statistics.median(plain)),
                target=">= 1.0",
                runs=ours,
                note=f"{shape.words}; {options.threads} thread(s), processor time",
            )
        )
    count = sum(p.numel() for p in make_model(shape).parameters())
    static = 12 * count  # gradient and two moments, float32: the same in both arms
    ours, plain = (peak_in_child(options, name, arm) for arm in ("ours", "plain"))
    found.append(
        record(
            "perf",
            "trainer",
            f"{name}: peak memory",
            (ours - static) / 1e6,
            "MB",
            baseline=("plain transformers loop", (plain - static) / 1e6),
            target="<= 0.6",
            note=f"above weights, gradients and moments; with gradients and moments {ours / 1e6:.0f} MB, "
            f"plain {plain / 1e6:.0f} MB",
        )
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--shape", choices=SHAPES, help="only this one")
    parser.add_argument("--quick", action="store_true", help="small batches, 3 repetitions; writes only with -o")
    parser.add_argument("--peak-of", choices=ARMS, help=argparse.SUPPRESS)
    parser.add_argument("-o", "--output", type=Path, help=f"default docs/results/{OUTPUT.name}")
    trainer_device.add_options(parser)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.model:
        trainer_device.report(options)
        return
    shapes = QUICK if options.quick else SHAPES
    if options.peak_of:
        print(peak_bytes(shapes[options.shape], options.peak_of))
        return
    if options.quick:
        options.repetitions = 3
    names = [options.shape] if options.shape else list(shapes)
    found = [row for name in names for row in measure(options, name, shapes[name])]
    print(table(found))
    output = options.output or (None if options.quick or options.shape else OUTPUT)
    if output:
        write(found, output)


if __name__ == "__main__":
    main()
