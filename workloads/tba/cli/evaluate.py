"""Answer prompts with a model in this process, score the answers, and summarise.

snapshot -> engine.submit/step -> responses -> reward processes -> rewards (prompts, samples) -> Result
"""

import math
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import torch

from tba.cli.local_plan import num_cores
from tba.cli.model_directory import directory_snapshot, read_snapshot
from tba.contracts import keys
from tba.contracts.config import Model, Prompts, Reward, Sampling
from tba.contracts.errors import UserError
from tba.models import build_model
from tba.prompts import PromptSet, load_prompt_set, materialize
from tba.rewards.sandbox import RewardCall, RewardPool
from tba.rewards.stored import get_reward_code
from tba.run_record import read_run_record
from tba.searcher.engines.engine import Engine, Request, Response
from tba.searcher.engines.transformers import TransformersEngine
from tba.snapshots.snapshot import Snapshot
from tba.store import open_store
from tba.store.protocol import ObjectStore


@dataclass(frozen=True, slots=True)
class Choice:
    """What the command line says; None: the run's own."""

    prompts: Path | None = None
    prompt_field: str | None = None
    answer_field: str | None = None
    """Empty: the prompts have no answers."""
    reward: str | None = None
    sampling: Literal["greedy", "sample"] | None = None
    samples: int | None = None
    temperature: float | None = None
    max_tokens: int | None = None
    dtype: Literal["bfloat16", "float32"] | None = None
    limit: int | None = None
    seed: int = 0

    def columns(self, prompts: Prompts) -> Prompts:
        """`prompts` with the columns that the command line names."""
        changes: dict[str, str | None] = {}
        if self.prompt_field is not None:
            changes["prompt_field"] = self.prompt_field
        if self.answer_field is not None:
            changes["answer_field"] = self.answer_field or None
        return prompts.model_copy(update=changes)


@dataclass(frozen=True, slots=True)
class Task:
    """Everything decided: how prompts are answered and scored."""

    model: Model
    reward: Reward
    sampling: Sampling
    greedy: bool
    samples: int
    seed: int
    reward_code: str | None = None
    """Of a reward whose code lies in the run's bucket."""


@dataclass(frozen=True, slots=True)
class Result:
    """Rewards of 0 and 1 make pass_at_1 the expected accuracy of one sample, pass_at_k that of the best of k."""

    version: int | None
    num_prompts: int
    samples: int
    sampling: str
    pass_at_1: float
    standard_error: float
    pass_at_k: float
    failed: int
    mean_response_tokens: float

    def to_dict(self) -> dict[str, Any]:
        """For `--json`: camelCase names."""
        names = {"pass_at_1": "passAt1", "pass_at_k": "passAtK", "num_prompts": "numPrompts"}
        names |= {"standard_error": "standardError", "mean_response_tokens": "meanResponseTokens"}
        return {names.get(k, k): v for k, v in asdict(self).items()}

    def describe(self) -> str:
        """For people."""
        best = f", pass@{self.samples} {self.pass_at_k:.4f}" if self.samples > 1 else ""
        which = f"version {self.version}" if self.version is not None else "model directory"
        return (
            f"{which}: pass@1 {self.pass_at_1:.4f} ± {self.standard_error:.4f}{best} "
            f"({self.num_prompts} prompts, {self.sampling}, {self.mean_response_tokens:.1f} tokens a response, "
            f"{self.failed} not scored)"
        )


def of_run(store: ObjectStore, version: int | None, choice: Choice) -> Result:
    """Evaluate a snapshot of a run. Raises: UserError, StoreUnavailable, CorruptObject."""
    run = read_run_record(store)
    config = run.config
    evaluation = config.task.evaluation
    snapshot = read_snapshot(store, version)
    task = _decide(choice, config.model, config.task.reward, config.task.sampling, evaluation)
    if choice.reward is None:
        task = replace(task, reward_code=get_reward_code(store, run.reward_code))
    if choice.prompts is None:
        if choice.prompt_field is not None or choice.answer_field is not None:
            raise UserError("--prompt-field and --answer-field name columns of a file: pass --prompts FILE as well")
        if run.eval_prompts is None:
            raise UserError(f"the run at {store.uri} has no evaluation prompts: pass --prompts FILE")
        prompts = load_prompt_set(store, run.eval_prompts)
    else:
        fields = evaluation.prompts or config.task.prompts
        prompts = _prompts_of(choice.prompts, choice.columns(fields), snapshot, task, choice.limit)
    return evaluate(snapshot, prompts, task, version=snapshot.manifest.version, limit=choice.limit)


def of_directory(folder: Path, choice: Choice) -> Result:
    """Evaluate a model directory. Raises: UserError."""
    if choice.prompts is None or choice.reward is None:
        given = {"--prompts FILE": choice.prompts, "--reward NAME": choice.reward}
        lacking = " and ".join(option for option, value in given.items() if value is None)
        raise UserError(f"a model directory says nothing of its task: pass {lacking}")
    model = Model(
        uri=f"file://{folder.resolve()}", dtype=choice.dtype or ("bfloat16" if _device() == "cuda" else "float32")
    )
    task = _decide(choice, model, Reward(name=choice.reward), Sampling(), None)
    snapshot = directory_snapshot(folder)
    fields = choice.columns(Prompts(uri=f"file://{choice.prompts.resolve()}"))
    prompts = _prompts_of(choice.prompts, fields, snapshot, task, choice.limit)
    return evaluate(snapshot, prompts, task, version=None, limit=choice.limit)


def evaluate(
    snapshot: Snapshot, prompts: PromptSet, task: Task, *, version: int | None, limit: int | None = None
) -> Result:
    """Answer and score the first `limit` prompts, each `task.samples` times."""
    count = len(prompts) if limit is None else min(limit, len(prompts))
    engine = TransformersEngine(
        dtype=getattr(torch, task.model.dtype),
        device=_device(),
        max_model_len=task.model.max_model_len,
        trust_remote_code=task.model.trust_remote_code,
    )
    with RewardPool(task.reward, num_workers=num_cores(), code=task.reward_code) as pool:
        engine.load(snapshot)
        responses = _generate(engine, prompts, count, task)
        whole = [r for r in responses if r.error is None]
        results = pool.score(_call(engine, prompts, r, r.id // task.samples) for r in whole)
    if all(scored.reward is None for scored in results):
        why = next((told for told in [*(r.error for r in responses), *(s.error for s in results)] if told), "")
        raise UserError(f"none of {len(responses)} responses could be scored, so there is no score: {why}")
    rewards: list[list[float]] = [[] for _ in range(count)]
    for response, scored in zip(whole, results, strict=True):
        if scored.reward is not None:
            rewards[response.id // task.samples].append(scored.reward)
    return summarise(
        rewards,
        version=version,
        samples=task.samples,
        sampling="greedy" if task.greedy else "sample",
        num_tokens=[len(r.tokens) for r in responses],
    )


def summarise(
    rewards: Sequence[Sequence[float]], *, version: int | None, samples: int, sampling: str, num_tokens: Sequence[int]
) -> Result:
    """`rewards`: a prompt each, its scored responses; prompts without any are left out and their responses counted."""
    means = [sum(r) / len(r) for r in rewards if r]
    n = len(means)
    mean = sum(means) / n if n else 0.0
    variance = sum((m - mean) ** 2 for m in means) / (n - 1) if n > 1 else 0.0
    return Result(
        version=version,
        num_prompts=n,
        samples=samples,
        sampling=sampling,
        pass_at_1=mean,
        standard_error=math.sqrt(variance / n) if n else 0.0,
        pass_at_k=sum(max(r) for r in rewards if r) / n if n else 0.0,
        failed=len(num_tokens) - sum(len(r) for r in rewards),
        mean_response_tokens=sum(num_tokens) / len(num_tokens) if num_tokens else 0.0,
    )


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _call(engine: Engine, prompts: PromptSet, response: Response, prompt: int) -> RewardCall:
    return RewardCall(prompts.texts[prompt], engine.decode(response.tokens), prompts.answers[prompt])


def _generate(engine: Engine, prompts: PromptSet, count: int, task: Task) -> list[Response]:
    done: list[Response] = []
    waiting = list(range(count * task.samples))[::-1]
    while waiting or engine.in_flight:
        while waiting and engine.in_flight < engine.capacity:
            number = waiting.pop()
            tokens = prompts.prompt_tokens(number // task.samples).tolist()
            engine.submit(
                Request(
                    id=number,
                    prompt_tokens=tokens,
                    max_tokens=task.sampling.max_tokens,
                    temperature=task.sampling.temperature,
                    greedy=task.greedy,
                    seed=task.seed * 1_000_003 + number,
                    stop=task.sampling.stop,
                )
            )
        done += engine.step()
    return sorted(done, key=lambda r: r.id)


def _decide(choice: Choice, model: Model, reward: Reward, sampling: Sampling, evaluation: Any) -> Task:
    """Command line before run before default."""
    kind = choice.sampling or ("sample" if (choice.samples or 1) > 1 else None)
    kind = kind or (evaluation.sampling if evaluation else "greedy")
    own_samples = evaluation.samples if evaluation and evaluation.sampling == kind else 1
    samples = choice.samples or own_samples
    if kind == "greedy" and samples > 1:
        raise UserError(f"--samples must be 1 with greedy sampling, got {samples}: add --sampling sample")
    if choice.reward is not None:
        reward = Reward(name=choice.reward)
    if choice.dtype is not None:
        model = model.model_copy(update={"dtype": choice.dtype})
    changes = {"temperature": choice.temperature, "max_tokens": choice.max_tokens}
    sampling = sampling.model_copy(update={k: v for k, v in changes.items() if v is not None})
    if sampling.max_tokens >= model.max_model_len:
        raise UserError(
            f"--max-tokens must be below the model's maxModelLen, got {sampling.max_tokens} >= {model.max_model_len}"
        )
    return Task(model, reward, sampling, kind == "greedy", samples, choice.seed)


def _prompts_of(file: Path, fields: Prompts, snapshot: Snapshot, task: Task, limit: int | None) -> PromptSet:
    """Prompts of a file, read and tokenised as a run does it."""
    config = fields.model_copy(update={"uri": f"file://{file.resolve()}", "config_map_ref": None})
    _, tokenizer = build_model(
        snapshot.assets, dtype=torch.bfloat16, device="meta", trust_remote_code=task.model.trust_remote_code
    )
    sha, data = materialize(
        config,
        cast(Any, tokenizer),
        base_dir=file.resolve().parent,
        max_prompt_tokens=task.model.max_model_len - task.sampling.max_tokens,
        limit=limit,
    )
    with tempfile.TemporaryDirectory(prefix="tba-eval-") as folder:
        store = open_store(f"file://{folder}")
        store.put_once(keys.prompts_key(sha), data)
        return load_prompt_set(store, keys.prompts_key(sha))
