"""Our training step against TRL's on the same rows: tokens a second, and memory beyond weights and optimizer state.

160 rows of 32 + 1..768 tokens (mean about half of the longest, 65,000 in all), AdamW, clipping; float32 weights under
bfloat16 autocast for TRL, float32 masters with a bfloat16 working copy for ours. TRL's arm is its own GRPOTrainer: its
loss function with its fused LM head, on rows padded as it pads a generation batch, in the micro-batch that is fastest
for it. Each arm and size runs in a process of its own.

    step            forward, backward, clip, update
    with scoring    plus the pass without gradients that each system makes before it: ours the reference, TRL the
                    log-probs of the sampling policy that it computes whenever vLLM generates

PYTHONPATH=workloads:tests python tests/bench/gpu/bench_trainer_gpu.py --tokenizer FOLDER [-o FILE]
PYTHONPATH=workloads:tests python tests/bench/gpu/bench_trainer_gpu.py --rehearse
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from bench.gpu.places import in_child, tiny_start
from bench.gpu.weights import random_model
from bench.results import Row, own_command, record, table, write

PROMPTS, RESPONSES, PROMPT_TOKENS, LONGEST = 10, 16, 32, 768
VOCABULARY = 255
"""Ids used: every shape has them, and their number changes no cost."""
LEARNING_RATE = 1e-6


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["0.135b", "1.5b"])
    parser.add_argument("--tokenizer", type=Path, help="folder of any tokenizer: TRL wants one")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--micro-rows", type=int, nargs="+", default=[8, 16, 40, 80], help="TRL's; the fastest counts")
    parser.add_argument("--micro-batch-tokens", type=int, default=None, help="ours; default: the trainer's own")
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations in TRL's arm")
    parser.add_argument("--set", action="append", default=[], dest="settings", help="of trainer: NAME=VALUE")
    parser.add_argument("--liger", action="store_true", help="Liger's layer kernels in TRL's arm")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU; without TRL only our arm")
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=int, nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    if options.rows is None:
        options.rows = [2, 4, 8, 24] if options.rehearse else [PROMPTS, RESPONSES, PROMPT_TOKENS, LONGEST]
    if options.arm:
        options.result.write_text(json.dumps(ARMS[options.arm](options, options.shapes[0])))
        return
    with tempfile.TemporaryDirectory() as folder:
        if options.rehearse:
            options.tokenizer = tiny_start(Path(folder)) / "start"
            options.shapes, options.repetitions, options.micro_rows = ["tiny"], 2, [4]
        rows = [row for shape in options.shapes for row in measure(options, shape)]
    print(table(rows))
    if options.output:
        write(rows, options.output)


def measure(options: argparse.Namespace, shape: str) -> list[Row]:
    """Rows of one size; without TRL only ours."""
    ours = in_process(options, "ours", shape, 0)
    theirs = [found for rows in options.micro_rows if (found := in_process(options, "trl", shape, rows))]
    if ours is None:
        raise SystemExit(f"{shape}: our step failed, see above")
    tokens = int(lengths(options.rows).sum())
    budget = options.micro_batch_tokens
    changed = [*options.settings, *([f"microBatchTokens={budget}"] if budget else [])]
    name = ", ".join([shape, *changed])
    note = f"{tokens} tokens, rows of {options.rows[2]} + 1..{options.rows[3]}; "
    note += "ours: float32 masters, bfloat16 working copy; TRL: float32 weights, bfloat16 autocast"
    if options.checkpointing:
        note += "; TRL recomputes activations"
    command = own_command().replace("PYTHONPATH=workloads ", "PYTHONPATH=workloads:tests ")
    rows: list[Row] = []
    for kind, what in (("step", "step"), ("scored", "step with scoring pass")):
        best = min(theirs, key=lambda t: statistics.median(t[kind]), default=None)
        rates = [tokens / s for s in ours[kind]]
        baseline = None
        if best:
            baseline = (f"TRL, {best['micro_rows']} rows a micro-batch", tokens / statistics.median(best[kind]))
        rows.append(
            record(
                "perf", "gpu_trainer", f"{name}: {what}", statistics.median(rates), "tokens/s", baseline=baseline,
                target=">= 1.3" if best else None, runs=rates, command=command, note=note,
            )
        )  # fmt: skip
    if ours["peak"]:
        best = min(theirs, key=lambda t: statistics.median(t["scored"]), default=None)
        told = f"total {ours['peak'] / 1e9:.2f} GB"
        told += f", TRL {best['peak'] / 1e9:.2f} GB in the micro-batch that is fastest for it" if best else ""
        rows.append(
            record(
                "perf", "gpu_trainer", f"{name}: peak memory beyond static state", ours["extra"] / 1e9, "GB",
                baseline=("TRL", best["extra"] / 1e9) if best else None, target="<= 0.6" if best else None,
                command=command, note=told,
            )
        )  # fmt: skip
    return rows


def in_process(options: argparse.Namespace, arm: str, shape: str, micro_rows: int) -> dict[str, Any] | None:
    """One arm; None if it failed, as running out of memory is one of the things to find out."""
    argv = [__file__, "--arm", arm, "--shapes", shape, "--repetitions", str(options.repetitions)]
    argv += ["--tokenizer", str(options.tokenizer), "--rows", *map(str, options.rows)]
    argv += ["--micro-rows", str(micro_rows)] if micro_rows else []
    argv += [f"--{n}" for n in ("checkpointing", "liger") if getattr(options, n)]
    argv += ["--micro-batch-tokens", str(options.micro_batch_tokens)] if options.micro_batch_tokens else []
    for setting in options.settings:
        argv += ["--set", setting]
    try:
        found = in_child(argv, quiet=True)
    except RuntimeError as error:
        print(f"{shape}, {arm} {micro_rows or ''}: {error}", flush=True)
        return None
    print(f"{shape}, {arm} {micro_rows or ''}: {statistics.median(found['step']):.3f} s a step", flush=True)
    return found


def lengths(rows: list[int]) -> np.ndarray:
    """(P, K) prompt and response tokens of each row."""
    prompts, responses, prompt_tokens, longest = rows
    return prompt_tokens + np.random.default_rng(0).integers(1, longest + 1, (prompts, responses))


def run_ours(options: argparse.Namespace, shape: str) -> dict[str, Any]:
    """The real learner; its sampler draws exactly these rows in every step."""
    from tba.contracts.config import LiveConfig, RunConfig
    from tba.contracts.keys import ShardKey
    from tba.contracts.records import FinishReason, Outcome, ShardHeader, Span, Trajectory
    from tba.protocol.bookkeeping import Bookkeeping
    from tba.shards.batch import from_rows
    from tba.trainer.learner import Learner
    from tba.trainer.model import Policy

    prompts, responses, prompt_tokens, longest = options.rows
    dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    config = RunConfig.model_validate(
        {
            "model": {"uri": "file:///none", "dtype": dtype, "maxModelLen": prompt_tokens + longest},
            "task": {"prompts": {"uri": "file:///none"}, "reward": {"name": "fake"}},
            "objective": {
                "responsesPerPrompt": responses,
                "promptsPerBatch": prompts,
                "learningRate": LEARNING_RATE,
                "optimizer": {"maxGradNorm": 1.0},
            },
            # Equal responses stay apart, so that both arms train the same rows.
            "buffer": {"minInitialTrajectories": 0, "onPolicyProbability": 1.0, "deduplicate": False},
        }
    )
    trainer = {name: yaml.safe_load(value) for name, _, value in (s.partition("=") for s in options.settings)}
    trainer |= {"microBatchTokens": options.micro_batch_tokens} if options.micro_batch_tokens else {}
    live = LiveConfig.model_validate(
        {"storage": {"uri": "file:///none"}, "buffer": {"maxReplayRatio": None}, "trainer": trainer}
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    reference = config.objective.reference
    policy = Policy(random_model(shape, device=device), config=config.model, reference=reference, temperature=1.0)
    learner = Learner(policy, config)
    rng = np.random.default_rng(1)
    rows = [
        Trajectory(
            prompt_id=p,
            visit=p,
            visit_size=responses,
            prompt_tokens=np.random.default_rng(p).integers(3, VOCABULARY, prompt_tokens).tolist(),
            response_tokens=rng.integers(3, VOCABULARY, int(length) - prompt_tokens).tolist(),
            outcome=Outcome.SCORED,
            reward=float(rng.integers(0, 2)),
            finish_reason=FinishReason.STOP,
            spans=[Span(int(length) - prompt_tokens, 1, 0)],
            temperature=1.0,
            created_at=0.0,
        )
        for p, group in enumerate(lengths(options.rows))
        for length in group
    ]
    header = ShardHeader(run="f" * 32, searcher="s", incarnation="a" * 32, seq=0, reward_version="bench")
    learner.ingest_shard(ShardKey(0, "s", "a" * 32, 0).path, from_rows(header, rows), Bookkeeping.begun(1))
    keys = iter(range(10**6))

    def scored() -> None:
        learner.buffer.set_reference(f"again {next(keys)}")  # forgets the cached reference log-probs
        learner.train_step(live, 1)

    gradients = sum(p.numel() * 4 for p in policy.model.parameters())
    return timed(options, lambda: learner.train_step(live, 1), scored, learner.optimizer.zero_grad, gradients)


def run_trl(options: argparse.Namespace, shape: str) -> dict[str, Any]:
    """TRL's GRPOTrainer: its model preparation and `compute_loss`, driven without its data loader."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore

    prompts, responses, prompt_tokens, longest = options.rows
    cuda = torch.cuda.is_available()
    rows, micro = prompts * responses, options.micro_rows[0]
    with tempfile.TemporaryDirectory() as folder:
        settings = GRPOConfig(
            output_dir=folder, learning_rate=LEARNING_RATE, per_device_train_batch_size=micro,
            gradient_accumulation_steps=rows // micro, num_generations=responses, max_completion_length=longest,
            beta=0.0, bf16=cuda, use_cpu=not cuda, gradient_checkpointing=options.checkpointing, report_to="none",
            save_strategy="no", max_grad_norm=1.0,
        )  # fmt: skip
        trainer = GRPOTrainer(
            model=random_model(shape, device="cuda" if cuda else "cpu"),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=settings,
            train_dataset=Dataset.from_dict({"prompt": ["1"] * rows}),
            processing_class=AutoTokenizer.from_pretrained(options.tokenizer),
        )
    model: Any = trainer.model.train()
    if options.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if options.liger:
        from transformers.integrations.liger import apply_liger_kernel  # pyright: ignore

        apply_liger_kernel(model, {"fused_linear_cross_entropy": False, "cross_entropy": False})
    device = next(model.parameters()).device
    trainer.current_gradient_accumulation_steps = rows // micro
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=cuda)
    batches = trl_batches(options.rows, micro, device)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        for batch in batches:
            trainer.compute_loss(model, batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    def scored() -> None:
        with torch.no_grad():
            for batch in batches:
                ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
                mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
                trainer._get_per_token_logps_and_entropies(model, ids, mask, batch["completion_ids"].shape[1], micro)
        step()

    gradients = sum(p.numel() * 4 for p in model.parameters())
    found = timed(options, step, scored, lambda: optimizer.zero_grad(set_to_none=True), gradients)
    return found | {"micro_rows": micro}


def trl_batches(shape: list[int], micro: int, device: torch.device) -> list[dict[str, torch.Tensor]]:
    """Rows in random order, all padded to the longest response of the whole batch, in pieces of `micro` rows."""
    _, _, prompt_tokens, _ = shape
    sizes = lengths(shape).ravel() - prompt_tokens
    rng = np.random.default_rng(2)
    sizes = sizes[rng.permutation(len(sizes))]
    longest = int(sizes.max())
    mask = torch.from_numpy((np.arange(longest)[None] < sizes[:, None]).astype(np.int64))  # (n, L)
    completions = torch.from_numpy(rng.integers(3, VOCABULARY, (len(sizes), longest))) * mask
    inputs = {
        "prompt_ids": torch.from_numpy(rng.integers(3, VOCABULARY, (len(sizes), prompt_tokens))),
        "prompt_mask": torch.ones((len(sizes), prompt_tokens), dtype=torch.long),
        "completion_ids": completions,
        "completion_mask": mask,
        "advantages": torch.from_numpy(rng.standard_normal(len(sizes))).float(),
    }
    on_device = {name: tensor.to(device) for name, tensor in inputs.items()}
    total = {"num_items_in_batch": mask.sum().to(device)}
    return [
        {name: tensor[start : start + micro] for name, tensor in on_device.items()} | total
        for start in range(0, len(sizes), micro)
    ]


def timed(
    options: argparse.Namespace,
    step: Callable[[], object],
    scored: Callable[[], object],
    forget: Callable[[], object],
    gradient_bytes: int,
) -> dict[str, Any]:
    """Seconds of each repetition, and bytes: peak, and peak beyond weights, moments, gradients and reference."""
    cuda = torch.cuda.is_available()

    def seconds(action: Callable[[], object]) -> float:
        started = time.perf_counter()
        action()
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - started

    for _ in range(2):
        seconds(scored)
    forget()
    static = torch.cuda.memory_allocated() + gradient_bytes if cuda else 0
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    found: dict[str, Any] = {"step": [], "scored": []}
    for _ in range(options.repetitions):
        found["step"].append(seconds(step))
        found["scored"].append(seconds(scored))
    peak = torch.cuda.max_memory_allocated() if cuda else 0
    return found | {"peak": peak, "extra": peak - static}


ARMS = {"ours": run_ours, "trl": run_trl}


if __name__ == "__main__":
    main()
