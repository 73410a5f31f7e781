"""The server that TRL's AsyncGRPO generates with: vLLM's own, with graphs, lengths and places as our engine has."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tba.parent import die_with_parent
from tba.searcher.engines.vllm_options import environment, vllm_options

_OURS = {"load_format", "worker_extension_cls", "seed", "tensor_parallel_size", "trust_remote_code"}
"""Arguments of our engine that say how its weights arrive, or what is so by default."""


def serve(spec: Any, *, port: int, log: Path, env: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    """Start it, in a group of its own; it ends with this process. It serves the start's weights until others come."""
    cpu = not env["CUDA_VISIBLE_DEVICES"]
    argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *arguments(spec, port=port, cpu=cpu)]
    # The routes that take weights are of vLLM's development mode; workers meet the trainer on this address.
    own = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_HOST_IP": "127.0.0.1"}
    with log.open("wb") as file:
        return subprocess.Popen(
            argv,
            env={**environment(cpu=cpu), **env, **own},
            stdout=file,
            stderr=file,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )


def arguments(spec: Any, *, port: int, cpu: bool) -> list[str]:
    """Of `vllm serve`: those of our engine that are no matter of how weights arrive."""
    engine, seed = spec.searcher.engine, spec.objective.seed
    options = vllm_options(engine, spec.model, known=engine.extra_args, cpu=cpu, seed=seed).engine_args
    argv = ["--model", spec.model.uri.removeprefix("file://"), "--host", "127.0.0.1", "--port", str(port)]
    argv += ["--uvicorn-log-level", "warning", "--seed", str(seed)]
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if name in _OURS:
            continue
        if isinstance(value, bool):
            argv += [flag] if value else []
        else:
            argv += [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
    return argv if cpu else [*argv, "--weight-transfer-config", json.dumps({"backend": "nccl"})]
