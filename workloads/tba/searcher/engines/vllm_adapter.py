"""An adapter beside its base in vLLM: whether it can be there, with what arguments, how it gets in. No vLLM here.

    W x        by vLLM's own layer, loaded once
    + B' (A x) by its adapter kernels, in the dtype of the weights; B' = s·B, rounded once

The scale goes into B before its dtype changes, so that vLLM's own scale is 1 whatever ranks and alphas it knows.
"""

import json
import os
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from tba.contracts.config import LoRA
from tba.lora import A, B, peft_files
from tba.snapshots.layout import serialise

ADAPTER_ID = 1
"""vLLM's number for it: of the one adapter that there is, whatever its version."""


def served_rank(rank: int, ranks: Sequence[int]) -> int | None:
    """The least of vLLM's `ranks` that holds an adapter of `rank`."""
    return min((r for r in ranks if r >= rank), default=None)


def obstacle(lora: LoRA, *, merge: bool, supported: bool, ranks: Sequence[int], dtype: str, cpu: bool) -> str | None:
    """Why adapters are to be merged, or None. `supported`: vLLM's class of the model has adapters."""
    if merge:
        return "searcher.engine.extraArgs.mergeAdapter asks for it"
    if not supported:
        return "vLLM has no adapters for this model"
    if served_rank(lora.rank, ranks) is None:
        return f"vLLM's adapters have at most {max(ranks)} ranks, not {lora.rank}"
    if dtype == "float32" and not cpu:
        return "vLLM's kernels for adapters compute in 16 bits, and in float32 merging loses nothing"
    return None


def lora_arguments(
    lora: LoRA, *, ranks: Sequence[int], packed: Mapping[str, Sequence[str]], known: Collection[str]
) -> dict[str, Any]:
    """Arguments of vLLM's EngineArgs for one adapter on the target modules alone.

    `packed`: the layers that vLLM makes of several of the checkpoint's, by name.
    """
    arguments: dict[str, Any] = {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 1}
    arguments["max_lora_rank"] = served_rank(lora.rank, ranks)
    if "lora_target_modules" in known:  # else every linear layer computes with an adapter of zeros
        parts = {target.rpartition(".")[2] for target in lora.target_modules}
        wholes = {whole for whole, names in packed.items() if parts & set(names)}
        arguments["lora_target_modules"] = sorted(parts | wholes)
    return arguments


def adapter_shapes(targets: Mapping[str, nn.Linear], lora: LoRA) -> dict[str, list[int]]:
    """What every adapter of the run holds."""
    shapes = {name + A: [lora.rank, layer.in_features] for name, layer in targets.items()}
    return shapes | {name + B: [layer.out_features, lora.rank] for name, layer in targets.items()}


@contextmanager
def adapter_folder(adapter: Mapping[str, Tensor], lora: LoRA, *, scale: float) -> Iterator[Path]:
    """A folder in PEFT's format; the tensors are in memory, in a file without a name of its own."""
    # In float32 the scale itself would be rounded first.
    scaled = {n: (t.double() * scale).to(t.dtype) if n.endswith(B) else t for n, t in adapter.items()}
    plain = lora.model_copy(update={"alpha": float(lora.rank)})
    tensors, settings = peft_files(scaled, plain, uri=None, revision=None)
    memory = os.memfd_create("tba-adapter")
    try:
        with open(memory, "wb", closefd=False) as file:
            file.write(serialise(tensors))
        with tempfile.TemporaryDirectory(prefix="tba-adapter-") as folder:
            path = Path(folder)
            (path / "adapter_config.json").write_text(json.dumps(settings))
            (path / "adapter_model.safetensors").symlink_to(f"/proc/{os.getpid()}/fd/{memory}")
            yield path
    finally:
        os.close(memory)
