"""Runs inside vLLM's workers: fills their model from a snapshot's tensors, in place and in names of the checkpoint.

Layers that have an adapter are wrapped by vLLM; what loads weights sees them without.

    tensors ─► CUDA, plain layers ─► model.load_weights: copies into the tensors that kernels and CUDA graphs use
            └► anything else ─────► layerwise reload: each layer as at its first load, processed, copied over the old

`WeightLoader` becomes a base of vLLM's worker class (`worker_extension_cls`), in worker processes too.
Docs: docs/decisions/0019-vllm-engine.md says why not the weight-transfer API.
"""

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tba.failpoints import failpoint

_ALIGNMENT = 64
_PLAIN_METHODS = {"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"}
"""What vLLM calls layers whose kernels use the checkpoint's tensors as they are (on CUDA)."""


@dataclass(frozen=True, slots=True)
class SharedTensors:
    """Tensors in memory that processes of one host map: names, dtypes, shapes and places."""

    path: str
    num_bytes: int
    entries: dict[str, tuple[torch.dtype, tuple[int, ...], int]] = field(default_factory=dict)

    def tensors(self) -> dict[str, Tensor]:
        """Views of it."""
        flat = torch.from_file(self.path, shared=True, size=self.num_bytes, dtype=torch.uint8)
        found = {}
        for name, (dtype, shape, begin) in self.entries.items():
            size = torch.Size(shape).numel() * dtype.itemsize
            found[name] = flat[begin : begin + size].view(dtype).view(shape)
        return found


class SharedWeights:
    """Keeps memory for the weights of one engine: pages that exist are filled several times faster than new ones.

    A file without a name: it goes with the last process that has it, however that ends.
    """

    def __init__(self) -> None:
        self._file: int | None = None
        self._layout: SharedTensors | None = None

    def put(self, tensors: Mapping[str, Tensor]) -> SharedTensors:
        """Copy `tensors` to where workers see them."""
        entries, end = {}, 0
        for name, tensor in tensors.items():
            entries[name] = (tensor.dtype, tuple(tensor.shape), end)
            end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        if self._layout is None or self._layout.entries != entries:
            self.close()
            self._file = os.memfd_create("tba-weights")
            os.ftruncate(self._file, end)
            self._layout = SharedTensors(f"/proc/{os.getpid()}/fd/{self._file}", end, entries)
        for name, target in self._layout.tensors().items():
            target.copy_(tensors[name])
        return self._layout

    def close(self) -> None:
        """Give it up; who maps it keeps it."""
        if self._file is not None:
            os.close(self._file)
        self._file = self._layout = None


class WeightLoader:
    """Methods for `collective_rpc`; `self` is vLLM's worker."""

    def tba_load_weights(self, source: Mapping[str, Tensor] | SharedTensors) -> None:
        """Replace every weight. No batch may be running.

        Raises: RuntimeError if a weight of the model was not among them; whatever vLLM raises. Call it again with
        whole weights then: the model is a mixture.
        """
        worker: Any = self
        tensors = source.tensors() if isinstance(source, SharedTensors) else source
        model = worker.get_model()
        with _without_adapters(model):
            if worker.device.type == "cuda":
                if is_plain(model):
                    load_in_place(model, _stream(tensors, worker.device))
                else:
                    load_by_layer(model, worker.model_config, _stream(tensors, worker.device))
                torch.cuda.synchronize()
            else:
                load_by_layer(model, worker.model_config, _stream(tensors, worker.device))
                _repack_embeddings(model)

    def tba_adapted(self, adapter_id: int) -> tuple[int, list[str]]:
        """How many of an adapter's modules vLLM has, packed ones counted singly, and those for which it has no place.

        vLLM says nothing of the latter: it computes without them.
        """
        worker: Any = self
        manager = worker.model_runner.lora_manager._adapter_manager
        parts = manager.get_adapter(adapter_id).loras
        lost = sorted(name for name in parts if name not in manager.modules)
        many = [part.lora_a if isinstance(part.lora_a, list) else [part.lora_a] for part in parts.values()]
        return sum(a is not None for each in many for a in each), lost


@contextmanager
def _without_adapters(model: torch.nn.Module) -> Iterator[None]:
    """Each layer that has an adapter is the layer itself inside, under the name that the checkpoint has for it."""
    from vllm.lora.layers import BaseLayerWithLoRA

    wrapped = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent._modules.items()
        if isinstance(child, BaseLayerWithLoRA)
    ]
    for parent, name, child in wrapped:
        setattr(parent, name, child.base_layer)
    try:
        yield
    finally:
        for parent, name, child in wrapped:
            setattr(parent, name, child)


def _stream(tensors: Mapping[str, Tensor], device: torch.device) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors.items():
        failpoint("engine.between_tensors")
        # A copy of the whole tensor from pinned memory does not wait: the next one is prepared meanwhile.
        if device.type == "cuda" and tensor.is_pinned():
            tensor = tensor.to(device, non_blocking=True)
        yield name, tensor


def is_plain(model: torch.nn.Module) -> bool:
    """Whether kernels use every weight as the checkpoint has it: no quantised, expert or latent-attention layer."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if method is not None and type(method).__name__ not in _PLAIN_METHODS:
            return False
        if type(module).__name__.startswith("MLA") or "MoE" in type(module).__name__:
            return False
    return True


def load_in_place(model: Any, weights: Iterator[tuple[str, Tensor]]) -> None:
    """Copy weights into the model's own parameters."""
    wanted = {name for name, _ in model.named_parameters()}
    _check_complete(wanted, model.load_weights(weights))


def load_by_layer(model: Any, model_config: Any, weights: Iterator[tuple[str, Tensor]]) -> None:
    """Load layers whose kernels hold another form of the weights."""
    from vllm.model_executor.model_loader import reload

    # It warns of layers without weights, such as rotary embeddings; what is missing is found out below.
    logging.getLogger(f"{reload.__name__}.layerwise").setLevel(logging.ERROR)
    wanted = {name for name, _ in model.named_parameters()}  # a tied output layer is none of them
    reload.initialize_layerwise_reload(model)
    try:
        wanted &= {name for name, _ in model.named_parameters()}
        _check_complete(wanted, model.load_weights(weights))
    except BaseException:
        _abandon_reload(model)
        raise
    reload.finalize_layerwise_reload(model, model_config)


def _abandon_reload(model: torch.nn.Module) -> None:
    """Back to kernels' tensors in every layer that was not finished, or the next reload counts this one's too."""
    from vllm.model_executor.model_loader.reload import layerwise

    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        if info.can_load():
            if info.kernel_tensors is not None:
                layerwise._place_kernel_tensors(layer, info)
            info.reset()
    layerwise.LOADING_LAYERS.clear()


def _repack_embeddings(model: Any) -> None:
    """On CPUs a tied output layer multiplies with a packed copy of the embedding, which a reload leaves as it was."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding):
            module.quant_method.process_weights_after_loading(module)


def _check_complete(wanted: set[str], loaded: set[str] | None) -> None:
    if loaded is not None and (missing := sorted(wanted - loaded)):
        raise RuntimeError(f"vLLM's model has weights that the snapshot did not fill: {missing[:3]}")
