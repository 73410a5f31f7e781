"""Searcher tokens a second through our engine, against the raw engine given all requests at once, offline.

Both arms: the same prompts of the task `count` (long-tailed responses), the same limits, in processes of their own, one
after the other on one card. Ours is fed continuously, S requests a prompt, decodes and scores; once without and once
with new weights every 10 s.

PYTHONPATH=workloads:tests python tests/bench/gpu/bench_engine.py --model FOLDER [-o FILE]
PYTHONPATH=workloads:tests python tests/bench/gpu/bench_engine.py --rehearse
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.gpu import feed
from bench.gpu.places import flags, in_child, tiny_start
from bench.results import Row, own_command, record, table, write


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of a model that was taught to count, or of any other")
    parser.add_argument("--task", default="count")
    parser.add_argument("--prompts", type=int, default=512)
    parser.add_argument("--samples", type=int, default=16, help="S")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--max-model-len", type=int, default=512)
    parser.add_argument("--max-num-seqs", type=int, default=512)
    parser.add_argument("--utilization", type=float, default=0.6, help="share of the card's memory")
    parser.add_argument("--swap-seconds", type=float, default=10.0)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--engine", default="vllm")
    parser.add_argument("--rehearse", action="store_true", help="everything on a CPU with a tiny model")
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.rehearse and options.model is None:
            options.model = tiny_start(Path(folder)) / "start"
            options.prompts, options.samples, options.max_tokens, options.max_num_seqs = 12, 2, 12, 4
            options.engine, options.repetitions, options.swap_seconds = "transformers", 2, 0.02
        if options.model is None:
            parser.error("name --model, or --rehearse")
        if options.arm:
            options.result.write_text(json.dumps(ARMS[options.arm](options)))
            return
        found: dict[str, list[dict[str, Any]]] = {}
        rows: list[Row] = []
        for arm in ARMS:  # written after each, so that a sitting cut short leaves what it measured
            found[arm] = in_process(options, arm)
            rows = judge(options, found)
            if options.output:
                write(rows, options.output)
    print(table(rows))


def in_process(options: argparse.Namespace, arm: str) -> list[dict[str, Any]]:
    """One arm in a process of its own; what it measured, a dict a repetition."""
    names = ("task", "prompts", "samples", "max_tokens", "max_model_len", "max_num_seqs", "utilization")
    names += ("swap_seconds", "repetitions", "engine", "model")
    started = time.monotonic()
    found = in_child([__file__, "--arm", arm, *flags(options, names)])
    rates = ", ".join(f"{r['tokens'] / r['seconds']:,.0f}" for r in found)
    print(f"{arm}: {rates} tokens/s; {time.monotonic() - started:.0f} s with its start", flush=True)
    return found


def run_raw(options: argparse.Namespace) -> list[dict[str, Any]]:
    """All requests in one call; with vLLM its own LLM class, sampling without seeds and without decoding."""
    if options.engine != "vllm":
        return run_batch(options)
    import torch
    from transformers import AutoTokenizer
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

    from tba.searcher.engines.vllm_options import vllm_options

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    questions = feed.count_questions(tokenizer, options.task, options.prompts)
    settings, model = engine_settings(options)
    arguments = vllm_options(settings, model, known=[], cpu=not torch.cuda.is_available(), seed=0).engine_args
    own = (
        "load_format",
        "worker_extension_cls",
    )  # how a searcher gets its weights; this one reads them from the folder
    engine = LLM(model=str(options.model), **{k: v for k, v in arguments.items() if k not in own})
    sampling = SamplingParams(
        temperature=1.0, n=options.samples, max_tokens=options.max_tokens, detokenize=False, top_p=1.0, top_k=0
    )
    prompts: Any = [{"prompt_token_ids": q.tokens} for q in questions]
    engine.generate(prompts[:8], sampling, use_tqdm=False)
    found = []
    for _ in range(options.repetitions):
        started = time.perf_counter()
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - started
        tokens = sum(len(o.token_ids) for request in outputs for o in request.outputs)
        found.append({"tokens": tokens, "seconds": seconds, "loads": []})
    return found


def run_batch(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The same for our own engine, which has no offline call: everything submitted before the first step."""
    engine, questions, _ = our_engine(options)
    found = []
    for repetition in range(options.repetitions):
        started = time.perf_counter()
        for request in wanted(options, questions, repetition):
            engine.submit(request)
        tokens = 0
        while engine.in_flight:
            tokens += sum(len(r.tokens) for r in engine.step())
        seconds = time.perf_counter() - started
        found.append({"tokens": tokens, "seconds": seconds, "loads": []})
    return found


def run_ours(options: argparse.Namespace, *, swapping: bool = False) -> list[dict[str, Any]]:
    """The continuous feed."""
    from tba.contracts.config import Reward
    from tba.rewards.sandbox import RewardPool

    engine, questions, swap = our_engine(options)
    pool = RewardPool(Reward(name="gsm8k"), num_workers=2)
    drive: dict[str, Any] = dict(questions=questions, samples=options.samples, pool=pool)
    feed.drive(engine, wanted(options, questions[:8], 99), **drive)  # warms up
    swaps = feed.Swaps(swap, options.swap_seconds) if swapping else None
    found = []
    for repetition in range(options.repetitions):
        fed = feed.drive(engine, wanted(options, questions, repetition), swaps=swaps, **drive)
        errors = [r.error for r in fed.responses if r.error]
        if errors:
            raise RuntimeError(f"{len(errors)} responses failed, the first: {errors[0]}")
        found.append({"tokens": fed.tokens, "seconds": fed.seconds, "loads": fed.load_seconds})
    pool.close()
    engine.close()
    return found


def our_engine(options: argparse.Namespace) -> tuple[Any, list[feed.Question], Any]:
    """Engine with weights, questions, and what gives it new weights."""
    from bench.gpu.weights import in_memory_snapshot, load, staged

    from tba.searcher.engines import build

    loaded = load(options.model, max_model_len=options.max_model_len, dtype="bfloat16")
    tensors = staged(loaded.model)
    settings, model = engine_settings(options)
    engine = build(settings, model=model)
    engine.load(in_memory_snapshot(tensors, loaded.assets, 0))
    questions = feed.count_questions(loaded.tokenizer, options.task, options.prompts)
    # The same weights under another version: loading them costs what any others cost.
    return engine, questions, lambda version: in_memory_snapshot(tensors, loaded.assets, version)


def engine_settings(options: argparse.Namespace) -> tuple[Any, Any]:
    """The same for both arms."""
    from tba.contracts.config import Engine, Model

    engine = Engine(type=options.engine, max_num_seqs=options.max_num_seqs, gpu_memory_utilization=options.utilization)
    model = Model(uri=f"file://{options.model.resolve()}", dtype="bfloat16", max_model_len=options.max_model_len)
    return engine, model


def wanted(options: argparse.Namespace, questions: list[feed.Question], seed: int) -> Any:
    """The requests of one repetition."""
    return feed.requests(questions, samples=options.samples, max_tokens=options.max_tokens, seed=seed)


ARMS = {
    "raw": run_raw,
    "ours": run_ours,
    "ours-swapping": lambda options: run_ours(options, swapping=True),
}


def judge(options: argparse.Namespace, found: dict[str, list[dict[str, Any]]]) -> list[Row]:
    """Rows for docs/results."""
    rates = {arm: [r["tokens"] / r["seconds"] for r in runs] for arm, runs in found.items()}
    raw = statistics.median(rates["raw"])
    shape = (
        f"{options.model.name}, {options.task}: {options.prompts} x {options.samples} responses of at most "
        f"{options.max_tokens} tokens, {options.max_num_seqs} sequences, engine {options.engine}"
    )
    command = own_command().replace("PYTHONPATH=workloads ", "PYTHONPATH=workloads:tests ")
    rows = [
        record(
            "perf", "gpu_engine", f"{what}: tokens/s", statistics.median(rates[arm]), "tokens/s",
            baseline=("raw engine, offline", raw), target=">= 0.97", runs=rates[arm], command=command, note=shape,
        )
        for arm, what in (
            ("ours", "continuous feed"),
            ("ours-swapping", f"continuous feed, swap every {options.swap_seconds:g} s"),
        )
        if arm in found
    ]  # fmt: skip
    if "ours-swapping" not in found:
        return rows
    runs = found["ours-swapping"]
    loads = [s for r in runs for s in r["loads"]]
    if not loads:
        print(f"no swap: all repetitions ended within {options.swap_seconds:g} s; ask for more --prompts", flush=True)
        return rows
    swaps = f"{len(loads)} swaps, {min(loads):.3f} to {max(loads):.3f} s each; {shape}"
    rows.append(
        record(
            "perf", "gpu_engine", "stall of generation by swaps", sum(loads) / sum(r["seconds"] for r in runs),
            "of the time", target="<= 0.01", command=command, note=swaps,
        )
    )  # fmt: skip
    return rows


if __name__ == "__main__":
    main()
