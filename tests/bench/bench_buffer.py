"""Replay buffer at size: insert rate, time of a batch of 32 x 16, bytes a trajectory.

    python tests/bench/bench_buffer.py [--rows 1000000 10000000] [-o results.json]

Responses have 64 tokens; visits of 24 responses; 100 responses a prompt; one response in ten is a duplicate.
"""

import argparse
import resource
import time
from pathlib import Path

import numpy as np
from results import Row, record, table, write

from tba.contracts.records import ShardId
from tba.trainer.buffer import NewRows, ReplayBuffer
from tba.trainer.sampling import Sampler, SamplingSettings

TOKENS, VISIT, VISITS_A_SHARD, BATCHES = 64, 24, 42, 200
COMMAND = "python tests/bench/bench_buffer.py"


def shard(seq: int, num_prompts: int, rng: np.random.Generator) -> NewRows:
    """About a thousand rows."""
    n = VISITS_A_SHARD * VISIT
    tokens = rng.integers(0, 50_000, (VISITS_A_SHARD, VISIT, TOKENS), dtype=np.int32)
    copies = rng.random((VISITS_A_SHARD, VISIT)) < 0.1
    tokens[copies] = tokens[:, :1].repeat(VISIT, 1)[copies]
    prompts = (np.arange(VISITS_A_SHARD) + seq * VISITS_A_SHARD) % num_prompts
    return NewRows(
        shard=ShardId("0" * 32, seq),
        prompt_ids=prompts.repeat(VISIT),
        visits=(np.arange(VISITS_A_SHARD) + seq * VISITS_A_SHARD).repeat(VISIT),
        visit_sizes=np.full(n, VISIT),
        outcomes=np.zeros(n, "u1"),
        rewards=rng.random(n, dtype=np.float32),
        finish_stop=np.ones(n, bool),
        effective_versions=np.full(n, seq),
        response_tokens=tokens.ravel(),
        response_offsets=np.arange(n + 1, dtype="i8") * TOKENS,
        prompt_tokens=np.zeros(n, "i4"),
        prompt_offsets=np.arange(n + 1, dtype="i8"),
    )


def fill(num_rows: int, rng: np.random.Generator) -> tuple[ReplayBuffer, int, float, int]:
    """(buffer of `num_rows` distinct rows, rows inserted, seconds of inserting, next shard number)."""
    buffer = ReplayBuffer(capacity_per_prompt=100)
    seconds, seq = 0.0, 0
    num_prompts = num_rows // 80
    while len(buffer) < num_rows:
        rows = shard(seq, num_prompts, rng)
        started = time.perf_counter()
        buffer.add(rows)
        seconds += time.perf_counter() - started
        seq += 1
    return buffer, buffer.ingested_rows, seconds, seq


def batch_milliseconds(buffer: ReplayBuffer, seq: int, probability: float, rng: np.random.Generator) -> list[float]:
    """Of each batch, a shard arriving before every tenth."""
    settings = SamplingSettings(32, 16, 2, on_policy_probability=probability)
    sampler, times = Sampler(0), []
    for i in range(BATCHES):
        if i % 10 == 0:
            buffer.add(shard(seq + i // 10, buffer.num_prompts, rng))
        started = time.perf_counter()
        sampler.sample(buffer, seq + BATCHES, settings)
        times.append(1e3 * (time.perf_counter() - started))
    return times


def measure(num_rows: int) -> list[Row]:
    """Rows of one size."""
    rng = np.random.default_rng(0)
    name = f"{num_rows / 1e6:g}M"
    buffer, inserted, seconds, seq = fill(num_rows, rng)
    bytes_each = buffer.memory_bytes / len(buffer)
    rows = [
        record("perf", "buffer", f"insert {name}", inserted / seconds, "rows/s", target=">= 5e4", command=COMMAND),
        record(
            "perf", "buffer", f"memory {name}", bytes_each, "bytes/trajectory", target=f"<= {40 + 8 * TOKENS}",
            command=COMMAND, note=f"peak of the process {_peak_bytes() / len(buffer):.0f}",
        ),
    ]  # fmt: skip
    for probability in (0.95, 0.0):
        times = batch_milliseconds(buffer, seq, probability, rng)
        rows.append(
            record(
                "perf", "buffer", f"sample {name} m={probability}", float(np.median(times)), "ms", target="<= 5",
                command=COMMAND, note=f"p99 {np.percentile(times, 99):.2f} ms; P 32, K 16",
            )
        )  # fmt: skip
        seq += BATCHES
    return rows


def _peak_bytes() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> None:
    """Measure, print, and write if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000_000, 10_000_000])
    parser.add_argument("-o", "--out", type=Path, help="write the rows as JSON")
    arguments = parser.parse_args()
    rows = [row for num_rows in arguments.rows for row in measure(num_rows)]
    print(table(rows))
    if arguments.out:
        write(rows, arguments.out)


if __name__ == "__main__":
    main()
