"""Arm 3: TRL's GRPO on the same prompts, reward, lengths and start, a rank a card, vLLM colocated. By torchrun.

Settings are those found to work best for it in earlier trials (loss dapo, rewards scaled by group, no reference model,
importance sampling correction, 128 rows a micro-batch); changed is only how vLLM starts: bfloat16, and CUDA graphs as
our engine has them. The clock begins with the first step and stands still while held-out prompts are answered.
"""

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # TRL loads weights into the model object

import torch
import trl.generation.vllm_generation as generation  # pyright: ignore[reportMissingImports]
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore

from tba.cli.jobfile import load_job
from tba.rewards import lookup
from tba.searcher.engines.vllm_options import capture_sizes

MICRO_ROWS = 128


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--job", type=Path, required=True)
    parser.add_argument("--set", action="append", default=[], dest="settings")
    parser.add_argument("--task", required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--max-steps", type=int, required=True)
    parser.add_argument("--evaluate-every", type=int, default=10)
    parser.add_argument("--result", type=Path, required=True)
    options = parser.parse_args()
    spec = load_job(options.job, options.settings).spec
    start_engines_as_ours()
    trainer, watch = prepare(spec, options)
    trainer.train()
    if int(os.environ.get("RANK", "0")) == 0:
        options.result.write_text(json.dumps(watch.result()))
    torch.distributed.barrier()
    os._exit(0)  # vLLM's threads would hold the process


def start_engines_as_ours() -> None:
    """TRL has no setting for these two."""
    original = generation.LLM

    def start(**arguments: Any) -> Any:
        arguments["dtype"] = "bfloat16"
        arguments["compilation_config"] = {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": capture_sizes(arguments["max_num_seqs"]),
        }
        return original(**arguments)

    generation.LLM = start


def read_rows(uri: str) -> list[dict[str, str]]:
    """Questions and answers of a file."""
    return [json.loads(line) for line in Path(uri.removeprefix("file://")).read_text().splitlines()]


def prepare(spec: Any, options: argparse.Namespace) -> tuple[Any, "Watch"]:
    """The trainer and what follows it."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    objective, sampling, model = spec.objective, spec.task.sampling, spec.model
    rows = objective.prompts_per_batch * objective.responses_per_prompt
    micro = min(MICRO_ROWS, rows // world)
    folder = model.uri.removeprefix("file://")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    reward = lookup(spec.task.reward.name)

    def score(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        return [reward("", c[0]["content"], a) for c, a in zip(completions, answer, strict=True)]

    train = read_rows(spec.task.prompts.uri)
    data = Dataset.from_dict(
        {
            "prompt": [[{"role": "user", "content": r["question"]}] for r in train],
            "answer": [r["answer"] for r in train],
        }
    )
    settings = GRPOConfig(
        output_dir=str(options.result.with_suffix("")),
        learning_rate=objective.learning_rate,
        lr_scheduler_type="constant",
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=rows // world // micro,
        num_generations=objective.responses_per_prompt,
        max_completion_length=sampling.max_tokens,
        temperature=sampling.temperature,
        beta=0.0,
        loss_type="dapo",
        scale_rewards="group",
        max_steps=options.max_steps,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        bf16=True,
        gradient_checkpointing=False,
        seed=objective.seed,
        disable_tqdm=True,
        max_grad_norm=1.0,
        weight_decay=0.0,
        model_init_kwargs={"dtype": "float32", "attn_implementation": "sdpa"},
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=spec.searcher.engine.gpu_memory_utilization,
        vllm_max_model_length=model.max_model_len,
        vllm_importance_sampling_correction=True,
    )
    watch = Watch(spec, options, tokenizer, world)
    trainer = GRPOTrainer(
        model=folder, reward_funcs=score, args=settings, train_dataset=data, processing_class=tokenizer,
        callbacks=[watch],
    )  # fmt: skip
    watch.trainer = trainer
    return trainer, watch


class Watch(TrainerCallback):
    """Clock, curve and end of a run."""

    def __init__(self, spec: Any, options: argparse.Namespace, tokenizer: Any, world: int) -> None:
        self.trainer: Any = None
        self._options, self._tokenizer, self._world = options, tokenizer, world
        self._sampling = spec.task.sampling
        held_out = read_rows(spec.task.evaluation.prompts.uri)[: spec.task.evaluation.max_prompts]
        self._held_out = held_out
        self._reward = lookup(spec.task.reward.name)
        self._started = self._paused = 0.0
        self._steps: list[tuple[float, float]] = []
        self._scores: list[tuple[int, float, float]] = []
        self._rows = spec.objective.prompts_per_batch * spec.objective.responses_per_prompt
        self._tokens = 0.0

    def _seconds(self) -> float:
        return time.perf_counter() - self._started - self._paused

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Everything is loaded: the start's score, then the clock."""
        self._scores.append((0, 0.0, self._score()))
        self._started = time.perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """A step's reward."""
        if logs and "reward" in logs:
            self._steps.append((self._seconds(), float(logs["reward"])))
            self._tokens += float(logs.get("completions/mean_length", 0.0)) * self._rows

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """Score the new weights now and then; all ranks stop together."""
        step = int(state.global_step)
        if step % self._options.evaluate_every == 0:
            at, began = self._seconds(), time.perf_counter()
            self.trainer.vllm_generation.sync_weights()
            self._scores.append((step, at, self._score()))
            self._paused += time.perf_counter() - began
        stop = torch.tensor(float(self._seconds() > self._options.seconds), device="cuda")
        torch.distributed.broadcast(stop, 0)
        control.should_training_stop = bool(stop.item()) or step >= self._options.max_steps
        return control

    def _score(self) -> float:
        """Over all ranks, sampled as in training."""
        from vllm import SamplingParams  # pyright: ignore[reportMissingImports]

        rank = int(os.environ.get("RANK", "0"))
        rows = self._held_out[rank :: self._world]
        texts = [
            self._tokenizer.apply_chat_template(
                [{"role": "user", "content": r["question"]}], add_generation_prompt=True, tokenize=False
            )
            for r in rows
        ]
        prompts = [{"prompt_token_ids": self._tokenizer(t, add_special_tokens=False)["input_ids"]} for t in texts]
        sampling = SamplingParams(temperature=self._sampling.temperature, max_tokens=self._sampling.max_tokens)
        outputs = self.trainer.vllm_generation.llm.generate(prompts, sampling, use_tqdm=False)
        total = sum(self._reward("", o.outputs[0].text, r["answer"]) for o, r in zip(outputs, rows, strict=True))
        both = torch.tensor([total, float(len(rows))], device="cuda")
        torch.distributed.all_reduce(both)
        if rank == 0:
            print(f"held out: {(both[0] / both[1]).item():.3f} at {self._seconds() if self._started else 0:.1f} s")
        return float((both[0] / both[1]).item())

    def result(self) -> dict[str, Any]:
        """As every arm's."""
        facts = {"response tokens/s": self._tokens / self._steps[-1][0] if self._steps else 0.0}
        return {"steps": self._steps, "held_out": self._scores, "costs": None, "facts": facts}


if __name__ == "__main__":
    main()
