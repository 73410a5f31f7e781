"""A made-up run history: every kind of row, in the shape the trainer writes."""

import json
import math
import random

from tba.contracts.history import (
    EvalRow,
    EventRow,
    LengthRow,
    PublishRow,
    QuarantineRow,
    SampleRow,
    SearcherRow,
    StepRow,
)
from tba.contracts.keys import LogKey
from tba.contracts.records import Latest, RunRecord

START = 1_700_000_000.0
RUN_ID = "ab" * 16


def step_row(step, *, epoch=1, seed=0, **changes):
    noise = random.Random(seed * 100_003 + step)
    waits = {"wait_data": 0.3 * noise.random(), "wait_storage": 0.02 * noise.random()}
    train = 2.0 + noise.random() * 0.2
    values = {
        "epoch": epoch,
        "step": step,
        "time": START + 3 * step,
        "wall_seconds": 3.0 * step + 20,
        "step_seconds": 3.0,
        "wait_data_seconds": waits["wait_data"],
        "wait_storage_seconds": waits["wait_storage"],
        "score_seconds": 0.4,
        "train_seconds": train,
        "loss": noise.gauss(0, 0.1),
        "reward_mean": 1 / (1 + math.exp(-(step - 60) / 20)) + noise.gauss(0, 0.03),
        "generated_reward_mean": None if step % 3 else 1 / (1 + math.exp(-(step - 55) / 20)),
        "log_z": step / 20 + noise.gauss(0, 0.2),
        "kl": step / 30,
        "ell_std": 1 + noise.random(),
        "beta": 0.05,
        "beta_ratio": 0.2,
        "signal_groups_fraction": max(0.1, 1 - step / 150),
        "ess": 0.9,
        "grad_norm": 0.5 + noise.random(),
        "grad_clipped": step % 9 == 0,
        "learning_rate": 1e-4,
        "staleness": {step % 3: 10, 2: 6, 5: 1} if step > 5 else {0: 17},
        "replay_slots": step % 2,
        "slots": 7,
        "with_replacement": 0,
        "mop_recycles": step // 10,
        "trained_rows": 140 * step,
        "trained_tokens": 1400 * step,
        "ingested_rows": 100 * step + 500,
        "generated_tokens": 1000 * step + 5000,
        "duplicate_rows": 30 * step,
        "failed_rows": step // 40,
        "quarantined_shards": 1 if step > 30 else 0,
        "replay_ratio": 1.4,
        "buffer_rows": 70 * step + 500,
        "buffer_bytes": 9000 * step,
        "published_version": step - step % 2,
        "phase_seconds": {
            **waits, "collate": 0.1, "reference": 0.4, "forward_backward": train - 0.3, "optimizer": 0.3,
            "ingest": 0.02, "stage": 0.05 * (step % 2), "capture": 0.2 * (step % 10 == 0), "other": 0.08,
        },
        "scored_tokens": 400,
        "model_flops": 1e15,
        "peak_flops": 1e15,
    }  # fmt: skip
    return StepRow(**(values | changes))


def event(name, *, epoch=1, step=0, time=START, detail=""):
    return EventRow(epoch=epoch, step=step, time=time, event=name, detail=detail)


def evaluation(step, *, epoch=1, score=0.5):
    return EvalRow(
        epoch=epoch, step=step, time=START + 3 * step, policy_epoch=epoch, num_prompts=128, samples=4,
        sampling="sample", pass_at_1=score, pass_at_k=min(1.0, score + 0.1), standard_error=0.03, failed=0,
        mean_response_tokens=8.5,
    )  # fmt: skip


def searcher(name, incarnation, *, epoch=1, step=1, rows=800, failed=0):
    return SearcherRow(
        epoch=epoch, step=step, time=START + 3 * step, searcher=name, incarnation=incarnation, shards=9, rows=rows,
        failed=failed, tokens=7000, versions=21, newest_version=step, first_seen=START, last_seen=START + 3 * step,
        stats={"generated_tokens": 7000.0, "reward_timeouts": 1.0} | searcher_seconds(3.0 * step),
    )  # fmt: skip


def searcher_seconds(up):
    """Counters of a searcher that has worked for `up` seconds."""
    shares = {"generate": 0.8, "load": 0.02, "wait_weights": 0.05, "wait_reward": 0.06, "other": 0.07}
    zero = {"wait_storage_seconds": 0.0, "wait_idle_seconds": 0.0}
    work = {"up_seconds": up, "model_flops": 1e14 * up, "peak_flops": 1e15}
    return zero | work | {f"{name}_seconds": share * up for name, share in shares.items()}


def sample(step, reward, response="4 + 5 = 9", **changes):
    values = {"epoch": 1, "step": step, "time": START, "prompt": "What is 4 + 5?", "version": step, "searcher": "s-0"}
    return SampleRow(**(values | {"response": response, "reward": reward} | changes))


def whole_run(steps=120):
    """A run of one epoch with everything in it."""
    rows = [event("started", detail="from version 0")]
    rows += [step_row(s) for s in range(1, steps + 1)]
    rows += [evaluation(s, score=s / steps) for s in range(0, steps + 1, max(1, steps // 8))]
    for step in (*range(10, steps, 10), steps):
        rows += [searcher("searcher-0", "1" * 32, step=step), searcher("searcher-1", "2" * 32, step=step, rows=790)]
    rows += [sample(s, s / steps, f"answer {s}") for s in range(1, steps + 1, 5)]
    rows += [
        PublishRow(epoch=1, step=s, time=START, version=s, encoding="full", total_bytes=10**8, stage_seconds=0.01,
                   upload_seconds=0.2, commit_seconds=0.02)
        for s in range(0, steps + 1, 2)
    ]  # fmt: skip
    rows += [
        QuarantineRow(epoch=1, step=min(31, steps), time=START, key="shards/0000000001/x", reason="truncated"),
        LengthRow(epoch=1, step=steps, time=START, generated={4: 50, 5: 300, 9: 120, 40: 6},
                  trained={4: 60, 5: 350, 9: 130, 40: 7}),
        event("finished", step=steps, time=START + 3 * steps + 5, detail="totalSteps reached"),
    ]  # fmt: skip
    return rows


def run_record(**objective):
    return RunRecord.model_validate(
        {
            "runId": RUN_ID,
            "owner": "default/arithmetic",
            "config": {
                "model": {"uri": "hf://a/b"},
                "task": {"prompts": {"uri": "file:///p.jsonl"}, "reward": {"name": "arithmetic"}},
                "objective": {"totalSteps": 120, **objective},
            },
            "modelRevision": "main",
            "trainPrompts": "prompts/x.arrow",
            "live": {"storage": {"uri": "s3://b/run"}, "searcher": {"samplesPerPrompt": 24}},
        }
    )


def latest(**changes):
    values = {"commit": 3, "epoch": 1, "version": 120, "step": 120, "manifest": "weights/x", "nonce": "00" * 16}
    return Latest.model_validate(values | changes)


def log_object(epoch, seq, rows):
    """(key, bytes) of one object of the metrics log."""
    body = b"".join(r.to_json() + b"\n" for r in rows)
    json.loads(body.splitlines()[0])
    return LogKey("metrics", epoch, seq).path, body
