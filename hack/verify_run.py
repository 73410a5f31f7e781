# ruff: noqa: T201 (a command that prints)
"""Check a run's shards against fresh transformers forward passes: `python hack/verify_run.py URI`.

For a sample of trajectories: every span names a snapshot that was published; the recorded log-probabilities of its
tokens equal those of models loaded anew from those snapshots; the reward equals that of scoring the decoded text again.
Exits 1 if something disagrees by more than the tolerance.
"""

import argparse
import sys
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from tba.contracts.errors import CorruptObject, StoreUnavailable, UserError
from tba.contracts.keys import SHARDS, WEIGHTS, WeightsKey
from tba.contracts.records import Outcome, PolicyId, RunRecord, Trajectory
from tba.models import build_model, load_weights
from tba.prompts import PromptSet, load_prompt_set
from tba.rewards.sandbox import RewardCall, RewardPool
from tba.rewards.stored import get_reward_code
from tba.run_record import read_run_record
from tba.shards import decode_shard
from tba.snapshots import fetch_snapshot
from tba.store import ObjectStore, open_store


@dataclass(frozen=True, slots=True)
class Agreement:
    """What was compared, and the worst of it."""

    trajectories: int
    tokens: int
    versions: int
    max_logprob_difference: float
    max_reward_difference: float


def verify(store: ObjectStore, *, limit: int) -> Agreement:
    """Raises: UserError if there is no run; KeyError if a span names a policy that was never published."""
    record = read_run_record(store)
    prompts = load_prompt_set(store, record.train_prompts)
    rows = _sample(store, record, limit)
    models = Models(store)
    temperature = record.config.task.sampling.temperature
    worst = max(_difference(models, row, temperature) for row in sorted(rows, key=lambda r: r.spans))
    tokens = sum(len(row.response_tokens) for row in rows)
    code = get_reward_code(store, record.reward_code)
    reward = _reward_difference(record, prompts, rows, models.tokenizer, code)
    return Agreement(len(rows), tokens, len(models.seen), worst, reward)


def _sample(store: ObjectStore, record: RunRecord, limit: int) -> list[Trajectory]:
    rows = []
    for info in store.list_after(SHARDS):
        batch = decode_shard(store.get(info.key).data, run_id=record.run_id)
        rows += [batch.row(i) for i in range(len(batch))]
    chosen = np.linspace(0, len(rows) - 1, min(limit, len(rows))).astype(int)
    return [rows[i] for i in chosen]


class Models:
    """Fresh models of published snapshots, the last few kept."""

    def __init__(self, store: ObjectStore) -> None:
        keys = [info.key for info in store.list_after(WEIGHTS) if info.key.endswith("/manifest.json")]
        self._manifests = {PolicyId(k.epoch, k.version): k.path for k in map(WeightsKey.parse, keys)}
        self._store = store
        self.tokenizer: Any = None
        self.seen: set[PolicyId] = set()
        self.of = lru_cache(maxsize=4)(self._build)
        """The model of a policy. Raises: KeyError if it was never published."""

    def _build(self, policy: PolicyId) -> Any:
        snapshot = fetch_snapshot(self._store, self._manifests[policy])
        dtype = next(t.dtype for t in snapshot.tensors.values() if t.is_floating_point())
        model, self.tokenizer = build_model(snapshot.assets, dtype=dtype, device="cpu")
        load_weights(model, snapshot.tensors)
        self.seen.add(policy)
        return model


@torch.no_grad()
def _difference(models: Models, row: Trajectory, temperature: float) -> float:
    """Largest |recorded - fresh| over the response's tokens, without padding.

    Where weights were swapped amid a response, so are they here: keys and values of earlier tokens stay those of the
    policies that computed them, as in a searcher.
    """
    if row.sampler_logprobs is None:
        raise SystemExit("the searchers recorded no log-probabilities: nothing to compare")
    ids = torch.tensor([[*row.prompt_tokens, *row.response_tokens]])  # (1, prompt + response)
    cache, fed, end, logits = DynamicCache(), 0, len(row.prompt_tokens), []
    for span in row.spans:
        end += span.num_tokens
        model = models.of(PolicyId(span.epoch, span.version))
        output = model(input_ids=ids[:, fed : end - 1], past_key_values=cache, use_cache=True)
        logits.append(output.logits[0, -span.num_tokens :].float())  # the last of a prompt predicts the first token
        fed = end - 1
    logprobs = (torch.cat(logits) / temperature).log_softmax(-1)
    fresh = logprobs.gather(1, torch.tensor(row.response_tokens)[:, None])[:, 0]
    return float((fresh - torch.tensor(row.sampler_logprobs)).abs().max())


def _reward_difference(
    record: RunRecord,
    prompts: PromptSet,
    rows: list[Trajectory],
    tokenizer,  # noqa: ANN001
    code: str | None,
) -> float:
    scored = [r for r in rows if r.outcome is Outcome.SCORED]
    calls = [
        RewardCall(
            prompts.texts[r.prompt_id],
            tokenizer.decode(list(r.response_tokens), skip_special_tokens=True),
            prompts.answers[r.prompt_id],
        )
        for r in scored
    ]
    with RewardPool(record.config.task.reward, num_workers=1, code=code) as pool:
        results = pool.score(calls)
    # As the bucket keeps them: float32.
    pairs = [(np.float32(a.reward or 0.0), np.float32(b.reward or 0.0)) for a, b in zip(results, scored, strict=True)]
    return max((abs(float(a) - float(b)) for a, b in pairs), default=0.0)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("uri")
    parser.add_argument("--limit", type=int, default=64, help="trajectories to compare")
    parser.add_argument("--tolerance", type=float, default=1e-3, help="of log-probabilities; 1e-3 suits float32")
    options = parser.parse_args()
    try:
        found = verify(open_store(options.uri), limit=options.limit)
    except (UserError, CorruptObject, StoreUnavailable) as error:
        raise SystemExit(f"error: {error}") from error
    print(
        f"{found.trajectories} trajectories, {found.tokens} tokens of {found.versions} versions: "
        f"max |delta log-prob| {found.max_logprob_difference:.3g}, max |delta reward| {found.max_reward_difference:.3g}"
    )
    problems = []
    if found.max_logprob_difference > options.tolerance:
        problems.append(f"log-probabilities differ by more than --tolerance {options.tolerance:g}")
    if found.max_reward_difference > 0:
        problems.append("rewards differ: is its code the run's, and does it always answer the same?")
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
