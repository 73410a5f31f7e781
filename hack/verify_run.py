# ruff: noqa: T201 (a command that prints)
"""Check a run's shards against fresh transformers forward passes: `python hack/verify_run.py URI`.

For a sample of trajectories: every span names a snapshot that was published; the recorded log-probabilities of its
tokens equal those of a model loaded anew from that snapshot; the reward equals that of scoring the decoded text again.
Exits 1 if something disagrees by more than the tolerance.
"""

import argparse
import sys
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import torch

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
    manifests = _published(store)
    by_policy: dict[PolicyId, list[tuple[Trajectory, int, int]]] = defaultdict(list)
    for row in rows:
        start = 0
        for span in row.spans:
            by_policy[PolicyId(span.epoch, span.version)].append((row, start, start + span.num_tokens))
            start += span.num_tokens
    worst, tokens, tokenizer = 0.0, 0, None
    for policy, pieces in by_policy.items():
        snapshot = fetch_snapshot(store, manifests[policy])
        dtype = next(t.dtype for t in snapshot.tensors.values() if t.is_floating_point())
        model, tokenizer = build_model(snapshot.assets, dtype=dtype, device="cpu")
        load_weights(model, snapshot.tensors)
        for row, start, end in pieces:
            worst = max(worst, _difference(model, row, start, end, record.config.task.sampling.temperature))
            tokens += end - start
    code = get_reward_code(store, record.reward_code)
    reward = _reward_difference(record, prompts, rows, tokenizer, code)
    return Agreement(len(rows), tokens, len(by_policy), worst, reward)


def _sample(store: ObjectStore, record: RunRecord, limit: int) -> list[Trajectory]:
    rows = []
    for info in store.list_after(SHARDS):
        batch = decode_shard(store.get(info.key).data, run_id=record.run_id)
        rows += [batch.row(i) for i in range(len(batch))]
    chosen = np.linspace(0, len(rows) - 1, min(limit, len(rows))).astype(int)
    return [rows[i] for i in chosen]


def _published(store: ObjectStore) -> dict[PolicyId, str]:
    keys = [info.key for info in store.list_after(WEIGHTS) if info.key.endswith("/manifest.json")]
    return {PolicyId(k.epoch, k.version): k.path for k in map(WeightsKey.parse, keys)}


@torch.no_grad()
def _difference(model: torch.nn.Module, row: Trajectory, start: int, end: int, temperature: float) -> float:
    """Largest |recorded - fresh| over tokens [start, end) of the response: one forward pass, no cache, no padding."""
    if row.sampler_logprobs is None:
        raise SystemExit("the searchers recorded no log-probabilities: nothing to compare")
    ids = torch.tensor([[*row.prompt_tokens, *row.response_tokens]])
    first = len(row.prompt_tokens) - 1
    logprobs = (model(input_ids=ids).logits[0, first:-1].float() / temperature).log_softmax(-1)
    fresh = logprobs.gather(1, torch.tensor(row.response_tokens)[:, None])[:, 0]
    recorded = torch.tensor(row.sampler_logprobs)
    return float((fresh - recorded)[start:end].abs().max())


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
    return max((abs((a.reward or 0.0) - (b.reward or 0.0)) for a, b in zip(results, scored, strict=True)), default=0.0)


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
    return int(found.max_logprob_difference > options.tolerance or found.max_reward_difference > 0)


if __name__ == "__main__":
    sys.exit(main())
