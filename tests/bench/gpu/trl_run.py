"""What both TRL arms share: the command line, prompts, reward, settings, clock and curve of a run."""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from bench.gpu.grading import Graders
from datasets import Dataset
from transformers import TrainerCallback

from tba.cli.jobfile import load_job
from tba.contracts.config import Reward

MICRO_ROWS = 128


def parse() -> argparse.Namespace:
    """Options of a TRL process; `spec` is the job's."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", type=Path, required=True)
    parser.add_argument("--set", action="append", default=[], dest="settings")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--max-steps", type=int, required=True)
    parser.add_argument("--evaluate-every", type=int, default=10)
    parser.add_argument("--server", help="of an asynchronous run: where its engine answers")
    parser.add_argument("--store", help="of an asynchronous run: where its weights are kept for scoring")
    parser.add_argument("--result", type=Path, required=True)
    options = parser.parse_args()
    options.spec = load_job(options.job, options.settings).spec
    return options


def read_rows(uri: str) -> list[dict[str, str]]:
    """Questions and answers of a file."""
    return [json.loads(line) for line in Path(uri.removeprefix("file://")).read_text().splitlines()]


def dataset(spec: Any) -> Dataset:
    """Training prompts, in the order of the file."""
    rows = read_rows(spec.task.prompts.uri)
    prompts = [[{"role": "user", "content": r["question"]}] for r in rows]
    return Dataset.from_dict({"prompt": prompts, "answer": [r["answer"] for r in rows]})


class BatchReward:
    """TRL's reward function: a batch at a time. Pickled into the process that calls it, where its graders are made."""

    __name__ = "reward"

    def __init__(self, reward: Reward, *, processes: int) -> None:
        self._reward, self._processes = reward, processes
        self._graders: Graders | None = None

    def __call__(self, completions: list[Any], answer: list[str], prompts: list[Any], **_: Any) -> list[float]:
        """Of each completion."""
        if self._graders is None:
            self._graders = Graders(self._reward, processes=self._processes)
        calls = zip(prompts, completions, answer, strict=True)
        return self._graders.score([(p[-1]["content"], c[0]["content"], a) for p, c, a in calls])


def settings(options: argparse.Namespace, *, world: int) -> dict[str, Any]:
    """Arguments of GRPOConfig and of AsyncGRPOConfig: the job's batch, limits and optimizer."""
    spec, cuda = options.spec, torch.cuda.is_available()
    objective, sampling = spec.objective, spec.task.sampling
    rows = objective.prompts_per_batch * objective.responses_per_prompt
    micro = min(MICRO_ROWS, rows // world)
    return dict(
        output_dir=str(options.result.with_suffix("")),
        learning_rate=objective.learning_rate,
        lr_scheduler_type="constant",
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=rows // world // micro,
        num_generations=objective.responses_per_prompt,
        max_completion_length=sampling.max_tokens,
        temperature=sampling.temperature,
        max_steps=options.max_steps,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        bf16=cuda,
        use_cpu=not cuda,
        gradient_checkpointing=False,
        seed=objective.seed,
        disable_tqdm=True,
        max_grad_norm=1.0,
        weight_decay=0.0,
    )


class Clock(TrainerCallback):
    """Seconds, rewards and response tokens of the steps. It starts with the first step and may stand still."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.trainer: Any = None
        self.started = self.paused = 0.0
        self.steps: list[tuple[float, float]] = []
        self.scores: list[tuple[int, float, float]] = []
        self.facts: dict[str, Any] = {}

    @property
    def seconds(self) -> float:
        """Since the first step, without pauses; 0 before it."""
        return time.perf_counter() - self.started - self.paused if self.started else 0.0

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """A step's reward."""
        if logs and "reward" in logs:
            self.steps.append((self.seconds, float(logs["reward"])))
            self.note(logs)

    def note(self, logs: dict[str, Any]) -> None:
        """Whatever else a step's log tells."""

    def over(self, step: int) -> bool:
        """Whether the run ends after this step."""
        return self.seconds > self.options.seconds or step >= self.options.max_steps

    def result(self) -> dict[str, Any]:
        """As every arm's."""
        return {"steps": self.steps, "held_out": self.scores, "costs": None, "facts": self.facts}
