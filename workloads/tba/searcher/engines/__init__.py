"""Engines: what generates. Each is imported only if it is asked for."""

from importlib.util import find_spec

from tba.contracts import config
from tba.contracts.errors import UserError
from tba.searcher.engines.engine import Engine, Request, Response

__all__ = ["Engine", "Request", "Response", "build", "can_run_vllm"]

_TRANSFORMERS_ARGS = {"device", "kvCacheBytes"}


def build(engine: config.Engine, *, model: config.Model) -> Engine:
    """The engine of a job, without weights until its first `load`.

    Raises: UserError if it cannot run here or its extraArgs are unknown.
    """
    if engine.type == "fake":
        from tba.searcher.engines.fake import FakeEngine, fake_settings

        return FakeEngine(fake_settings(engine.extra_args), capacity=engine.max_num_seqs or 256)
    if engine.type == "transformers":
        return _transformers(engine, model)
    problem = "it is not installed" if find_spec("vllm") is None else "this version has no engine for it"
    raise UserError(f"searcher.engine.type vllm cannot run here: {problem}; set searcher.engine.type: transformers")


def can_run_vllm() -> bool:
    """Whether an engine of type vllm could be built here."""
    return False


def _transformers(engine: config.Engine, model: config.Model) -> Engine:
    import torch

    from tba.searcher.engines.transformers import TransformersEngine

    unknown = set(engine.extra_args) - _TRANSFORMERS_ARGS
    if unknown:
        raise UserError(
            f"searcher.engine.extraArgs of engine transformers are {sorted(_TRANSFORMERS_ARGS)}, got {sorted(unknown)}"
        )
    if engine.tensor_parallel_size != 1:
        raise UserError(
            f"searcher.engine.tensorParallelSize must be 1 with engine transformers, got {engine.tensor_parallel_size}"
        )
    return TransformersEngine(
        dtype=getattr(torch, model.dtype),
        device=engine.extra_args.get("device", "cuda" if torch.cuda.is_available() else "cpu"),
        max_model_len=model.max_model_len,
        max_rows=engine.max_num_seqs,
        kv_cache_bytes=int(engine.extra_args.get("kvCacheBytes", 2**30)),
        trust_remote_code=model.trust_remote_code,
    )
