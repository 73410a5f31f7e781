"""What a job may say about vLLM, and what it may not: settings in, arguments of vLLM's EngineArgs out. No vLLM here.

Neutral sampling is this project's side of the objective, and weights, lengths and places belong to fields of the job,
so extraArgs that would change either are refused by name.
"""

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tba.contracts import config
from tba.contracts.errors import UserError
from tba.contracts.records import PolicyId, Span
from tba.searcher.engines.engine import Request

WEIGHT_LOADER = "tba.searcher.engines.vllm_weights.WeightLoader"
LOGPROBS_SHARE, REQUEST_SEEDS, ADMITTED_AT_ONCE = "logprobsShare", "requestSeeds", "admittedAtOnce"
MERGE_ADAPTER = "mergeAdapter"
_OWN = (LOGPROBS_SHARE, REQUEST_SEEDS, ADMITTED_AT_ONCE, MERGE_ADAPTER)
_CPU_KV_CACHE_BYTES = 2**30
_WAITING_SHARE = 8
_ADMISSION_SHARE = 8
_MIN_TEMPERATURE = 0.01
"""vLLM silently samples at this where less is asked for."""

_FIELDS = {
    "model": "model.uri",
    "dtype": "model.dtype",
    "max_model_len": "model.maxModelLen",
    "trust_remote_code": "model.trustRemoteCode",
    "revision": "model.revision",
    "enable_lora": "model.lora",
    "max_lora_rank": "model.lora.rank",
    "lora_target_modules": "model.lora.targetModules",
    "tensor_parallel_size": "searcher.engine.tensorParallelSize",
    "gpu_memory_utilization": "searcher.engine.gpuMemoryUtilization",
    "max_num_seqs": "searcher.engine.maxNumSeqs",
}
_NEUTRAL = "responses must be sampled from the whole distribution of the published weights"
_WEIGHTS = "weights, config and tokenizer come from the run's snapshots"
_PARTS = "a searcher is one engine in one process: add searchers to scale"
_TOKENS = "it would change what a request's tokens are"
_ADAPTER = "the one adapter there is comes from model.lora"
_REFUSED = (
    dict.fromkeys(
        ("generation_config", "override_generation_config", "logits_processors", "logprobs_mode", "max_logprobs",
         "quantization", "quantization_config", "hf_overrides", "watermark_config", "reasoning_config",
         "structured_outputs_config", "seed"),
        _NEUTRAL,
    )
    | dict.fromkeys(
        ("load_format", "model_weights", "tokenizer", "skip_tokenizer_init", "tokenizer_mode", "tokenizer_revision",
         "code_revision", "config_format", "hf_config_path", "hf_token", "download_dir", "model_loader_extra_config",
         "weight_transfer_config", "worker_extension_cls", "worker_cls", "served_model_name", "model_class_overrides"),
        _WEIGHTS,
    )
    | dict.fromkeys(
        ("pipeline_parallel_size", "data_parallel_size", "data_parallel_rank", "data_parallel_size_local",
         "data_parallel_backend", "nnodes", "node_rank", "kv_transfer_config", "ec_transfer_config",
         "enable_elastic_ep", "scheduler_cls"),
        _PARTS,
    )
    | dict.fromkeys(
        ("runner", "convert", "pooler_config", "speculative_config", "spec_method", "spec_model", "spec_tokens",
         "diffusion_config", "enable_prompt_embeds", "stream_interval", "tokens_only", "enable_trace_replay"),
        _TOKENS,
    )
    | dict.fromkeys(
        ("max_loras", "max_cpu_loras", "lora_dtype", "default_mm_loras", "enable_tower_connector_lora",
         "enable_mixed_moe_lora_format", "enable_moe_shared_loras"),
        _ADAPTER,
    )
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class VllmOptions:
    """An engine's settings, checked."""

    engine_args: dict[str, Any]  # of EngineArgs, all but `model`
    logprobs_share: float  # of the sampled responses that carry log-probs, 0..1
    request_seeds: bool | None  # null: where vLLM takes them at no cost
    admitted_at_once: int | None  # places that must be free before prompts enter; null: see `admitted_at_once`
    merge_adapter: bool = False  # even where vLLM could have it beside its base


def environment(*, cpu: bool) -> dict[str, str]:
    """Variables that vLLM wants before it is imported; what is set already wins."""
    found = {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if cpu:  # threads that spin while they wait make two cores three times slower; compiling delays the first token
        found |= {
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "TORCHDYNAMO_DISABLE": "1",
        }
    return found


def vllm_options(
    engine: config.Engine, model: config.Model, *, known: Collection[str], cpu: bool, seed: int
) -> VllmOptions:
    """Settings of a job as arguments of vLLM. `known` are the fields of its EngineArgs, `seed` is the process's own.

    Raises: UserError for an unknown or refused extraArg, or one of the wrong kind.
    """
    extra = dict(engine.extra_args)
    share = extra.pop(LOGPROBS_SHARE, 0.0)
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0.0 <= share <= 1.0:
        raise UserError(f"searcher.engine.extraArgs.{LOGPROBS_SHARE} must be a number from 0 to 1, got {share!r}")
    seeds = extra.pop(REQUEST_SEEDS, None)
    merge = extra.pop(MERGE_ADAPTER, None)
    for name, value in ((REQUEST_SEEDS, seeds), (MERGE_ADAPTER, merge)):
        if value is not None and not isinstance(value, bool):
            raise UserError(f"searcher.engine.extraArgs.{name} must be true or false, got {value!r}")
    at_once = extra.pop(ADMITTED_AT_ONCE, None)
    if at_once is not None and (isinstance(at_once, bool) or not isinstance(at_once, int) or at_once < 1):
        raise UserError(
            f"searcher.engine.extraArgs.{ADMITTED_AT_ONCE} must be a whole number of sequences from 1, got {at_once!r}"
        )
    for name in extra:
        _check_name(name, known)
    arguments: dict[str, Any] = {
        "dtype": model.dtype,
        "max_model_len": model.max_model_len,
        "trust_remote_code": model.trust_remote_code,
        "tensor_parallel_size": engine.tensor_parallel_size,
        "max_num_seqs": engine.max_num_seqs,
        "seed": seed,
        "load_format": "dummy",  # the first weights come as every later ones do
        "worker_extension_cls": WEIGHT_LOADER,
        "generation_config": "vllm",  # none of the model author's
        "logprobs_mode": "processed_logprobs",  # after the temperature
        "disable_log_stats": True,
    }
    arguments |= _on_cpu() if cpu else _on_gpu(engine)
    return VllmOptions(arguments | extra, float(share), seeds, at_once, bool(merge))


def _check_name(name: str, known: Collection[str]) -> None:
    where = f"searcher.engine.extraArgs.{name}"
    if name in _FIELDS:
        raise UserError(f"{where} has a field of its own: set {_FIELDS[name]}")
    if name in _REFUSED:
        raise UserError(f"{where} is refused: {_REFUSED[name]}")
    if name not in known:
        usable = [*sorted(set(known) - _REFUSED.keys() - _FIELDS.keys()), *_OWN]
        close = difflib.get_close_matches(name, usable, n=3)
        hint = f"did you mean {', '.join(close)}?" if close else "see EngineArgs of the installed vLLM"
        raise UserError(f"{where} is no argument of vLLM's engine: {hint}")


def _on_cpu() -> dict[str, Any]:
    return {"enforce_eager": True, "kv_cache_memory_bytes": _CPU_KV_CACHE_BYTES}


def _on_gpu(engine: config.Engine) -> dict[str, Any]:
    # Graphs of prefills were seen to be wrong with FlashAttention 3 (reference/vllm_gpu.md): decode only.
    compilation = {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": capture_sizes(engine.max_num_seqs or 1024),
    }
    return {"gpu_memory_utilization": engine.gpu_memory_utilization, "compilation_config": compilation}


def capture_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes with a CUDA graph, up to `max_num_seqs`, an eighth apart: a batch runs as the next larger.

    A batch above the largest would run without a graph, every kernel launched from Python.
    """
    sizes = [1, 2, 4, *range(8, 128, 8), *range(128, 256, 16), *range(256, 512, 32), *range(512, 1025, 64)]
    sizes += range(1024 + 128, max_num_seqs, 128)
    return [*(s for s in sizes if s < max_num_seqs), max_num_seqs]


def waiting_requests(max_num_seqs: int) -> int:
    """Requests wanted in flight beyond those that decode.

    The loop refills between any two steps, so none are needed while it does. An eighth covers turns in which it does
    not (it looks for the next block of an evaluation) or in which many responses end at once.
    """
    return -(-max_num_seqs // _WAITING_SHARE)


def admissible(*, held: int, running: int, max_num_seqs: int, at_once: int) -> int:
    """How many of the `held` requests vLLM gets before its next step; the others wait for more places to be free.

    A step that admits a prompt runs without a CUDA graph, for all sequences, each kernel launched from Python; so
    prompts enter `at_once` or more together. Nothing waits for long: places become free with every response, and
    whatever is held enters as soon as `at_once` places are.
    """
    free = max_num_seqs - running
    return min(held, free) if free >= at_once or not running else 0


def admitted_at_once(max_num_seqs: int, *, wanted: int | None, only_decoding_has_graphs: bool) -> int:
    """Places that must be free before prompts enter: what the job says, or an eighth where only decoding has graphs.

    With an eighth, a sixteenth of the places is empty on average. With N places, e ends a step, a step of G seconds and
    D more if it admits, the best is e·k with k = (√(D² + 2NDG/e) - D)/G: were D three times G, about 160 of 512
    for responses of 40 tokens and 50 for 500. An eighth lies between.
    """
    if wanted is None:
        wanted = max_num_seqs // _ADMISSION_SHARE if only_decoding_has_graphs else 1
    return min(max(1, wanted), max_num_seqs)


def refusal(request: Request, max_model_len: int) -> str | None:
    """Why vLLM cannot answer `request` as asked, or None."""
    length = len(request.prompt_tokens)
    if not (length > 0 and request.max_tokens > 0 and length + request.max_tokens <= max_model_len):
        return (
            f"{length} prompt tokens and {request.max_tokens} for the response do not fit maxModelLen {max_model_len}"
        )
    if not request.greedy and request.temperature < _MIN_TEMPERATURE:
        return f"vLLM samples at temperature {_MIN_TEMPERATURE} or more, got {request.temperature}: raise it"
    return None


def wants_logprobs(seed: int, share: float) -> bool:
    """Whether the request of this 63-bit seed is one of the `share` that carry log-probs."""
    return seed < share * 2.0**63


def spans_of(starts: Sequence[tuple[PolicyId, int]], num_tokens: int) -> list[Span]:
    """Spans of a response. `starts`: (policy, tokens there were when it took over), ascending, from 0."""
    ends = [start for _, start in starts[1:]] + [num_tokens]
    spans: list[Span] = []
    for (policy, start), end in zip(starts, ends, strict=True):
        count = max(0, min(end, num_tokens) - start)
        if not count:
            continue
        if spans and (spans[-1].epoch, spans[-1].version) == policy:
            spans[-1] = spans[-1]._replace(num_tokens=spans[-1].num_tokens + count)
        else:
            spans.append(Span(count, policy.epoch, policy.version))
    return spans or [Span(0, starts[-1][0].epoch, starts[-1][0].version)]


def misfit(expected: Mapping[str, Sequence[int]], found: Mapping[str, Sequence[int]]) -> str | None:
    """How the shapes `found` in a snapshot differ from the model's, or None."""
    missing, foreign = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    if missing or foreign:
        return f"weights do not fit the model: missing {missing[:3]}, foreign {foreign[:3]}"
    for name, shape in expected.items():
        if list(found[name]) != list(shape):
            return f"weights do not fit: {name} is {list(found[name])}, want {list(shape)}"
    return None
