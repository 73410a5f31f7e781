"""The synchronous loop: generate a batch, train on it, put the weights into the engine, again. One process a card.

    32 prompts x 16 ─► engine until all are done ─► rewards ─► Learner.train_step ─► engine.load ─┐
          ▲───────────────────────────────────────────────────────────────────────────────────────┘

Engine, learner, objective, reward and job file are those of an asynchronous run, so the difference is asynchrony. With
several ranks each takes its share of the prompts on its own card, and gradients are averaged before the update.

With a lag of L steps each batch waits in a queue while L others are trained on: data exactly L steps old, for studies
of what staleness costs. The queue is filled before the clock starts.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench.gpu import held_out
from bench.gpu.average import AveragingOptimizer, Ranks
from bench.gpu.curves import Costs, Point
from bench.gpu.grading import Graders, judge
from bench.gpu.many_engines import ManyEngines
from bench.gpu.weights import in_memory_snapshot, staged

from tba.contracts.config import LiveConfig, RunConfig
from tba.contracts.job import TBAJob
from tba.contracts.keys import ShardKey, new_nonce, prompts_key
from tba.contracts.records import Outcome, ShardHeader
from tba.models import load_model
from tba.prompts import PromptSet, PromptWalk, load_prompt_set, materialize
from tba.protocol.bookkeeping import Bookkeeping
from tba.searcher.engines import Engine, Response, build, with_logprobs
from tba.searcher.work import Settled, Visit, make_request, request_seed
from tba.shards.batch import from_rows
from tba.store import open_store
from tba.trainer.learner import Learner
from tba.trainer.model import DTYPES, Policy


@dataclass(slots=True)
class StepCost:
    """Seconds and tokens of one step, of the slowest rank where ranks wait for each other."""

    generate: float
    train: float
    switch: float
    tokens: int
    """Response tokens, of all ranks."""


@dataclass(slots=True)
class SyncRun:
    """What a run leaves."""

    steps: list[tuple[float, float]] = field(default_factory=list)
    """(seconds since the first request, without evaluations; mean reward of the batch)."""
    held_out: list[Point] = field(default_factory=list)
    costs: list[StepCost] = field(default_factory=list)
    full_rate: float = 0.0
    """Response tokens a second of one rank's engine that never empties."""

    def summary(self, world: int, *, skip: int = 3) -> Costs:
        """Medians of a step on one card, after the first steps."""
        rows = self.costs[skip:] or self.costs
        median = {n: float(np.median([getattr(c, n) for c in rows])) for n in ("generate", "train", "switch", "tokens")}
        ideal = median["tokens"] / world / self.full_rate
        return Costs(ideal, median["train"], median["switch"], median["generate"] / ideal)


class SyncLoop:
    """One rank."""

    def __init__(self, job: TBAJob, folder: Path, ranks: Ranks, *, lag: int = 0, engines: int = 1) -> None:
        """`folder`: for prompt sets. `lag`: steps between a batch's weights and its use. `engines`: on this card.

        Starts the engine before the learner takes memory.
        """
        self._ranks = ranks
        spec = job.spec
        config = spec.run_config()
        if config.objective.prompts_per_batch % ranks.world:
            raise SystemExit(f"P={config.objective.prompts_per_batch} is no multiple of {ranks.world} ranks")
        share = config.objective.prompts_per_batch // ranks.world
        self._config = _synchronous(config, share)
        self._live = _live(spec.live_config(), lag)
        self._lag = lag
        self._queue: deque[list[Visit]] = deque()
        loaded = load_model(config.model, base_dir=Path("."))
        self._assets = loaded.assets
        self._train, self._test = (
            load_prompts(p, loaded.tokenizer, config, folder, limit)
            for p, limit in (
                (config.task.prompts, None),
                (config.task.evaluation.prompts, config.task.evaluation.max_prompts),
            )
        )
        self._graders = Graders(config.task.reward, processes=ranks.world)
        self._judge = judge(config.task.reward)
        self._walk = PromptWalk(len(self._train), config.objective.seed, f"{ranks.rank}")
        settings = with_logprobs(spec.searcher.engine, config.objective)
        self.engine: Engine | ManyEngines = (
            build(settings, model=config.model)
            if engines == 1
            else ManyEngines(settings, config.model, number=engines, tokenizer=loaded.tokenizer)
        )
        first = staged(loaded.model, DTYPES[config.model.dtype])
        self.engine.load(in_memory_snapshot(first, self._assets, 0))
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        policy = Policy(
            loaded.model.to(device),
            config=config.model,
            reference=config.objective.reference,
            temperature=config.objective.temperature,
        )
        self.learner = Learner(policy, self._config)
        if ranks.world > 1:
            inner: Any = self.learner.optimizer
            self.learner.optimizer = AveragingOptimizer(inner, list(policy.model.parameters()), ranks)  # type: ignore[assignment]
        self._book = Bookkeeping.begun(1)
        self._visit = 0
        self._incarnation = f"{ranks.rank:032x}"

    def run(self, *, seconds: float, max_steps: int, evaluate_every: int, tell: Callable[[str], None]) -> SyncRun:
        """Until the clock or the step count is reached. The clock stands still during evaluations."""
        run = SyncRun(full_rate=self.full_rate())
        if evaluate_every:
            run.held_out.append(Point(0, 0.0, self.evaluate()))
            tell(f"held out at step 0: {run.held_out[0].score:.3f}")
        tell(f"full engine: {run.full_rate:,.0f} tokens/s")
        while len(self._queue) < self._lag:
            self._queue.append(self.generate(self._config.objective.prompts_per_batch))
        self._ranks.wait()
        clock = 0.0
        while clock < seconds and self.learner.step < max_steps:
            started = time.perf_counter()
            cost, reward = self._step()
            clock = self._slowest(clock + time.perf_counter() - started)
            run.costs.append(cost)
            run.steps.append((clock, reward))
            step = self.learner.step
            if evaluate_every and step % evaluate_every == 0:
                run.held_out.append(Point(step, clock, self.evaluate()))
                tell(
                    f"step {step} at {clock:.1f} s: held out {run.held_out[-1].score:.3f}, batch {reward:.3f}, "
                    f"g {cost.generate:.2f} t {cost.train:.2f} o {cost.switch:.3f} s"
                )
        self._refuse_drift()
        return run

    def _refuse_drift(self) -> None:
        """Ranks that were given the same gradients hold the same weights; else the arm is another algorithm."""
        own = sum(float(p.detach().double().sum()) for p in self.learner.policy.model.parameters())
        mean = self._ranks.total(own) / self._ranks.world
        if abs(own - mean) > 1e-6 * max(1.0, abs(mean)):
            raise RuntimeError(f"rank {self._ranks.rank} has weights that sum to {own}, the mean is {mean}")

    def _slowest(self, clock: float) -> float:
        """Ranks that end on different clocks would wait for each other for ever: the mean is everybody's."""
        return self._ranks.total(clock) / self._ranks.world

    def _step(self) -> tuple[StepCost, float]:
        started = time.perf_counter()
        self._queue.append(self.generate(self._config.objective.prompts_per_batch))
        generated = time.perf_counter()
        rewards = [row.reward or 0.0 for visit in self._queue[-1] for row in visit.trajectories()]
        rows = [row for visit in self._queue.popleft() for row in visit.trajectories()]
        seq = self.learner.step
        header = ShardHeader(
            run="0" * 32, searcher="sync", incarnation=self._incarnation, seq=seq, reward_version="bench"
        )
        path = ShardKey(0, "sync", self._incarnation, seq).path
        self.learner.ingest_shard(path, from_rows(header, rows), self._book)
        self.learner.train_step(self._live, 1)
        self._book = self._book.stepped()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        trained = time.perf_counter()
        self.engine.load(in_memory_snapshot(self.learner.policy.stage(), self._assets, self.learner.step))
        switched = time.perf_counter()
        tokens = self._ranks.total(sum(len(row.response_tokens) for row in rows))
        reward = self._ranks.total(sum(rewards)) / self._ranks.total(len(rewards))
        return StepCost(generated - started, trained - generated, switched - trained, int(tokens)), reward

    def generate(self, num_prompts: int) -> list[Visit]:
        """A visit to each of the walk's next prompts. Returns when the last response is there and scored."""
        size, temperature = self._config.objective.responses_per_prompt, self._config.task.sampling.temperature
        visits: list[Visit] = []
        for _ in range(num_prompts):
            visits.append(Visit(self._visit, next(self._walk), size, self._train, temperature))
            self._visit += 1
        ended: list[tuple[Response, Callable[[], float]]] = []
        waiting = [(v, j) for v in range(num_prompts) for j in range(size)][::-1]
        while waiting or self.engine.in_flight:
            while waiting and self.engine.in_flight < self.engine.capacity:
                v, j = waiting.pop()
                seed = request_seed(self._config.objective.seed, self._incarnation, visits[v].number, j)
                self._submit(v * size + j, visits[v].prompt, seed)
            for response in self.engine.step():
                prompt, text = visits[response.id // size].prompt, self.engine.decode(response.tokens)
                ended.append(
                    (response, self._graders.submit(self._train.texts[prompt], text, self._train.answers[prompt]))
                )
        for response, reward in ended:
            visits[response.id // size].settle(response.id % size, response, Settled(Outcome.SCORED, reward()))
        self._graders.forget()
        return visits

    def full_rate(self, *, batches: int = 6) -> float:
        """Tokens a second while the engine is full: from a quarter to three quarters of the responses of a long feed.

        Responses that end in that window began before it about as often as after it, so their tokens are its tokens.
        """
        prompts, size = self._config.objective.prompts_per_batch, self._config.objective.responses_per_prompt
        walk = PromptWalk(len(self._train), 1, "full-rate")
        total = batches * prompts * size
        queue = [(prompt, j) for prompt in islice(walk, batches * prompts) for j in range(size)]
        begin, end = total // 4, 3 * total // 4
        sent = done = tokens = 0
        begun = ended = 0.0
        while done < total:
            while sent < total and self.engine.in_flight < min(self.engine.capacity, prompts * size):
                prompt, j = queue[sent]
                self._submit(sent, prompt, request_seed(1, prompt, j))
                sent += 1
            for response in self.engine.step():
                self.engine.decode(response.tokens)
                done += 1
                tokens += len(response.tokens) if begin < done <= end else 0
                begun = time.perf_counter() if done == begin else begun
                ended = time.perf_counter() if done == end else ended
        return tokens / (ended - begun)

    def _submit(self, number: int, prompt: int, seed: int) -> None:
        sampling = self._config.task.sampling
        request = make_request(
            number,
            self._train.prompt_tokens(prompt).tolist(),
            max_tokens=sampling.max_tokens,
            max_model_len=self._config.model.max_model_len,
            temperature=sampling.temperature,
            greedy=False,
            seed=seed,
            stop=sampling.stop,
        )
        self.engine.submit(request)

    def evaluate(self) -> float:
        """Held-out score of the engine's weights, over all ranks."""
        ranks = self._ranks
        total, count = held_out.score(
            self.engine, self._test, self._judge, self._config, first=ranks.rank, every=ranks.world
        )
        return ranks.total(total) / ranks.total(count)


def _synchronous(config: RunConfig, share: int) -> RunConfig:
    """Each batch is what was just generated, all of it."""
    objective = config.objective.model_copy(update={"prompts_per_batch": share})
    buffer = config.buffer.model_copy(
        update={"on_policy_probability": 1.0, "min_initial_trajectories": 0, "max_replay_ratio": None}
    )
    return config.model_copy(update={"objective": objective, "buffer": buffer})


def _live(live: LiveConfig, lag: int) -> LiveConfig:
    buffer = live.buffer.model_copy(update={"max_replay_ratio": None, "max_policy_lag": lag})
    return live.model_copy(update={"buffer": buffer, "sync": live.sync.model_copy(update={"interval_steps": 1})})


def load_prompts(prompts: Any, tokenizer: Any, config: RunConfig, folder: Path, limit: int | None) -> PromptSet:
    """Through the same code and bytes as a run's."""
    if prompts is None:
        raise SystemExit("the job needs task.evaluation.prompts: learning is judged by them")
    longest = config.model.max_model_len - config.task.sampling.max_tokens
    sha, data = materialize(prompts, tokenizer, base_dir=Path("."), max_prompt_tokens=longest, limit=limit)
    store = open_store(f"file://{folder / new_nonce()}")
    store.put_once(prompts_key(sha), data)
    return load_prompt_set(store, prompts_key(sha))
