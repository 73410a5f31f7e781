"""Arm 3: TRL's GRPO on the same prompts, reward, lengths and start, a rank a card, vLLM colocated. By torchrun.

Settings are those found to work best for it in earlier trials (loss dapo, rewards scaled by group, no reference model,
importance sampling correction, 128 rows a micro-batch); changed is only how vLLM starts: bfloat16, and CUDA graphs as
our engine has them. The clock begins with the first step and stands still while held-out prompts are answered.
"""

import argparse
import json
import os
import time
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # TRL loads weights into the model object

import torch
import trl.generation.vllm_generation as generation  # pyright: ignore[reportMissingImports]
from bench.gpu import trl_run
from bench.gpu.grading import judge
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore

from tba.searcher.engines.vllm_options import capture_sizes


def main() -> None:
    """Command line."""
    options = trl_run.parse()
    start_engines_as_ours()
    trainer, watch = prepare(options)
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


def prepare(options: argparse.Namespace) -> tuple[Any, "Watch"]:
    """The trainer and what follows it."""
    spec, world = options.spec, int(os.environ.get("WORLD_SIZE", "1"))
    folder = spec.model.uri.removeprefix("file://")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    config = GRPOConfig(
        **trl_run.settings(options, world=world),
        beta=0.0,
        loss_type="dapo",
        scale_rewards="group",
        model_init_kwargs={"dtype": "float32", "attn_implementation": "sdpa"},
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=spec.searcher.engine.gpu_memory_utilization,
        vllm_max_model_length=spec.model.max_model_len,
        vllm_importance_sampling_correction=True,
    )
    watch = Watch(options, tokenizer, world)
    trainer = GRPOTrainer(
        model=folder,
        reward_funcs=trl_run.BatchReward(spec.task.reward, processes=world),
        args=config,
        train_dataset=trl_run.dataset(spec),
        processing_class=tokenizer,
        callbacks=[watch],
    )
    watch.trainer = trainer
    return trainer, watch


class Watch(trl_run.Clock):
    """Scores the weights as they are made, with the clock stopped; ends the run on all ranks together."""

    def __init__(self, options: argparse.Namespace, tokenizer: Any, world: int) -> None:
        super().__init__(options)
        self._tokenizer, self._world = tokenizer, world
        task, objective = options.spec.task, options.spec.objective
        self._sampling, self._judge = task.sampling, judge(task.reward)
        self._held_out = trl_run.read_rows(task.evaluation.prompts.uri)[: task.evaluation.max_prompts]
        self._rows = objective.prompts_per_batch * objective.responses_per_prompt
        self._tokens = 0.0

    def note(self, logs: dict[str, Any]) -> None:
        """Response tokens."""
        self._tokens += float(logs.get("completions/mean_length", 0.0)) * self._rows
        self.facts = {"response tokens/s": self._tokens / self.steps[-1][0]}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Everything is loaded: the start's score, then the clock."""
        self.scores.append((0, 0.0, self._score()))
        self.started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """Score the new weights now and then; all ranks stop together."""
        step = int(state.global_step)
        if step % self.options.evaluate_every == 0:
            at, began = self.seconds, time.perf_counter()
            self.trainer.vllm_generation.sync_weights()
            self.scores.append((step, at, self._score()))
            self.paused += time.perf_counter() - began
        stop = torch.tensor(float(self.over(step)), device="cuda")
        torch.distributed.broadcast(stop, 0)
        control.should_training_stop = bool(stop.item())
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
        total = sum(self._judge("", o.outputs[0].text, r["answer"]) for o, r in zip(outputs, rows, strict=True))
        both = torch.tensor([total, float(len(rows))], device="cuda")
        torch.distributed.all_reduce(both)
        if rank == 0:
            print(f"held out: {(both[0] / both[1]).item():.3f} at {self.seconds:.1f} s")
        return float((both[0] / both[1]).item())


if __name__ == "__main__":
    main()
