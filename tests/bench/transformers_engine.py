"""Compare ways to generate with transformers: `python tests/bench/transformers_engine.py MODEL_DIR [options]`.

continuous: our engine. cohort: our engine, filled only when it has run empty. generate: `model.generate` on batches.
paged: `model.generate_batch`, transformers' own continuous batching. All sample neutrally at T = 1, with the same
long-tailed limits on response length, so all make about the same number of tokens. Seconds are CPU seconds of this
process with one compute thread, which other processes of the machine disturb less than wall-clock time.
"""

import argparse
import os
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402
from transformers import GenerationConfig  # noqa: E402

from tba.contracts.config import Model  # noqa: E402
from tba.contracts.records import PolicyId  # noqa: E402
from tba.models import LoadedModel, load_model, weight_tensors  # noqa: E402
from tba.searcher.engines.engine import Request  # noqa: E402
from tba.searcher.engines.transformers import TransformersEngine  # noqa: E402


@dataclass
class Manifest:
    policy: PolicyId


@dataclass
class Weights:
    manifest: Manifest
    tensors: dict[str, torch.Tensor]
    assets: dict[str, bytes]


def requests(args: argparse.Namespace) -> list[Request]:
    """`visits` prompts with `samples` requests each; limits are lognormal, median `median`, capped at `max_tokens`."""
    rng = random.Random(0)
    made = []
    for visit in range(args.visits):
        prompt = [rng.randrange(args.low_id, args.high_id) for _ in range(args.prompt_tokens)]
        for j in range(args.samples):
            limit = min(args.max_tokens, 1 + int(args.median * rng.lognormvariate(0, args.sigma)))
            made.append(Request(visit * args.samples + j, prompt, limit, 1.0, False, rng.getrandbits(62)))
    return made


def ours(loaded: LoadedModel, wanted: list[Request], args: argparse.Namespace, *, cohort: bool) -> int:
    engine = TransformersEngine(dtype=torch.float32, device=args.device, max_model_len=2048, max_rows=args.rows)
    engine.load(Weights(Manifest(PolicyId(1, 0)), weight_tensors(loaded.model), loaded.assets))  # type: ignore[arg-type]
    tokens, queue = 0, list(wanted)
    args.start = time.process_time()
    while queue or engine.in_flight:
        if not cohort or engine.in_flight == 0:
            while queue and engine.in_flight < engine.capacity:
                engine.submit(queue.pop(0))
        tokens += sum(len(r.tokens) for r in engine.step())
    return tokens


def generate(loaded: LoadedModel, wanted: list[Request], args: argparse.Namespace) -> int:
    model: Any = loaded.model
    tokens = 0
    for at in range(0, len(wanted), args.rows):
        batch = wanted[at : at + args.rows]
        ids = torch.tensor([r.prompt_tokens for r in batch], device=args.device)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=settings(loaded, max(r.max_tokens for r in batch)),
        )
        for row, r in zip(out[:, ids.shape[1] :].tolist(), batch, strict=True):
            eos = loaded.tokenizer.eos_token_id
            tokens += min(r.max_tokens, row.index(eos) + 1 if eos in row else len(row))
    return tokens


def paged(loaded: LoadedModel, wanted: list[Request], args: argparse.Namespace) -> int:
    from transformers import ContinuousBatchingConfig

    model: Any = loaded.model
    config = settings(loaded, args.max_tokens)
    blocks = 4 + args.rows * (args.prompt_tokens + args.max_tokens) // 32
    cb = ContinuousBatchingConfig(
        page_size=32, num_blocks=blocks, max_batch_tokens=max(256, args.rows), max_requests_per_batch=args.rows
    )
    tokens = 0
    with model.continuous_batching_context_manager(generation_config=config, continuous_batching_config=cb) as manager:
        args.start = time.process_time()
        for r in wanted:
            manager.add_request(input_ids=list(r.prompt_tokens), max_new_tokens=r.max_tokens)
        for _ in wanted:
            result = None
            while result is None:
                result = manager.get_result(timeout=60)
                if result is None and not manager.is_running():
                    raise RuntimeError("the manager stopped")
            tokens += len(result.generated_tokens)
    return tokens


def settings(loaded: LoadedModel, max_new_tokens: int) -> GenerationConfig:
    eos = loaded.tokenizer.eos_token_id
    return GenerationConfig(
        do_sample=True, top_k=0, top_p=1.0, max_new_tokens=max_new_tokens, eos_token_id=eos, pad_token_id=eos
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--ways", nargs="+", default=["continuous", "cohort", "generate", "paged"])
    parser.add_argument("--visits", type=int, default=4)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=100)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--median", type=int, default=40)
    parser.add_argument("--sigma", type=float, default=0.8)
    parser.add_argument("--low-id", type=int, default=100)
    parser.add_argument("--high-id", type=int, default=40000)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    loaded = load_model(Model(uri=f"file://{args.model.resolve()}"), base_dir=Path())
    loaded.model.to(args.device)
    wanted = requests(args)
    ways = {
        "continuous": lambda: ours(loaded, wanted, args, cohort=False),
        "cohort": lambda: ours(loaded, wanted, args, cohort=True),
        "generate": lambda: generate(loaded, wanted, args),
        "paged": lambda: paged(loaded, wanted, args),
    }
    ours(loaded, wanted[: args.rows], args, cohort=True)  # warm-up
    for way in args.ways:
        args.start = time.process_time()
        with torch.no_grad():
            tokens = ways[way]()
        seconds = time.process_time() - args.start
        print(f"{way:11} {tokens:6} tokens  {seconds:6.1f} CPU s  {tokens / seconds:8.0f} tokens/s", flush=True)


if __name__ == "__main__":
    main()
