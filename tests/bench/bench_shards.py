"""Encode and decode of trajectory shards: rows a second, bytes a row.

python tests/bench/bench_shards.py --help
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from results import record, table, write

from tba.contracts.keys import new_nonce
from tba.contracts.records import FinishReason, Outcome, ShardHeader, Span, Trajectory
from tba.shards import decode_shard, encode_shard

SHAPES = ((5000, 64), (512, 512), (64, 1000))  # rows, response tokens a row


def rows(count: int, num_tokens: int, seed: int, *, logprobs: bool) -> list[Trajectory]:
    """Zipf token ids, as text has them; two policy spans a row; groups of 24."""
    rng = np.random.default_rng(seed)

    def row(i: int) -> Trajectory:
        return Trajectory(
            prompt_id=i // 24,
            visit=i // 24,
            visit_size=24,
            prompt_tokens=_zipf(rng, 100),
            response_tokens=_zipf(rng, num_tokens),
            outcome=Outcome.SCORED,
            reward=float(rng.random() < 0.5),
            finish_reason=FinishReason.STOP,
            spans=[Span(num_tokens - 5, 1, i // 100), Span(5, 1, i // 100 + 1)],
            temperature=1.0,
            created_at=1.75e9 + i,
            sampler_logprobs=rng.normal(-1, 1, num_tokens).astype(np.float32).tolist() if logprobs else None,
        )

    return [row(i) for i in range(count)]


def _zipf(rng: np.random.Generator, count: int) -> list[int]:
    return np.minimum(rng.zipf(1.3, count), 49151).tolist()


def seconds(action: Callable[[], object], repetitions: int) -> list[float]:
    """Processor seconds of each repetition: the work, whatever else the machine does."""
    taken = []
    for _ in range(repetitions + 1):  # the first one warms up
        start = time.process_time()
        action()
        taken.append(time.process_time() - start)
    return taken[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--logprobs", action="store_true", help="with sampler log-probabilities")
    parser.add_argument("-o", "--output", type=Path, help="write the rows as JSON")
    options = parser.parse_args()
    found = []
    for count, num_tokens in SHAPES:
        batch = rows(count, num_tokens, seed=0, logprobs=options.logprobs)
        header = ShardHeader(run=new_nonce(), searcher="s", incarnation=new_nonce(), seq=0, reward_version="bench")
        data = encode_shard(header, batch)
        shape = f"{count} rows x {num_tokens} tokens"
        for name, action, target in (
            ("encode", lambda h=header, b=batch: encode_shard(h, b), None),
            ("decode", lambda d=data, h=header: decode_shard(d, run_id=h.run), ">= 1e5" if num_tokens == 64 else None),
        ):
            rates = [count / s for s in seconds(action, options.repetitions)]
            median = statistics.median(rates)
            note = f"{median * num_tokens / 1e6:.1f} M response tokens/s; processor time"
            found.append(
                record("perf", "shards", f"{name}, {shape}", median, "rows/s", target=target, runs=rates, note=note)
            )
        found.append(record("perf", "shards", f"size, {shape}", len(data) / count, "B/row"))
    print(table(found))
    if options.output:
        write(found, options.output)


if __name__ == "__main__":
    main()
