"""Low-rank adapters: linear layers that have one, and weights with an adapter merged in (arXiv 2106.09685).

    y = x Wᵀ + b + s · (x Aᵀ) Bᵀ      s = alpha / rank
    W (out, in) frozen; A (r, in) and B (out, r) float32 masters, computed with in the dtype of x; B starts at 0

Tensors are named as PEFT names them, without its prefix: `<module>.lora_A.weight`, `<module>.lora_B.weight`.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager

import torch
import xxhash
from torch import Tensor, nn
from torch.nn.functional import linear

from tba.contracts.config import LoRA
from tba.contracts.errors import CorruptObject, UserError

A, B = ".lora_A.weight", ".lora_B.weight"


class LoRALinear(nn.Linear):
    """A linear layer with frozen weights, which it shares with `base`, and an adapter beside them."""

    def __init__(self, name: str, base: nn.Linear, settings: LoRA) -> None:
        super().__init__(base.in_features, base.out_features, bias=base.bias is not None, device="meta")
        self.weight, self.bias = base.weight, base.bias
        self.scale = scale_of(settings)
        self.enabled = True
        place = base.weight.device
        self.lora_A = nn.Linear(self.in_features, settings.rank, bias=False, device="meta")
        self.lora_B = nn.Linear(settings.rank, self.out_features, bias=False, device="meta")
        # Of the name alone: a run that begins again, or is replayed, begins with the same adapter.
        generator = torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(name.encode()) >> 1)
        first = torch.empty(settings.rank, self.in_features)
        nn.init.kaiming_uniform_(first, a=math.sqrt(5), generator=generator)
        self.lora_A.weight = nn.Parameter(first.to(place))
        self.lora_B.weight = nn.Parameter(torch.zeros(self.out_features, settings.rank, device=place))
        self.eval()

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (the name that nn.Linear gives it)
        """(…, in) -> (…, out)."""
        own = linear(input, self.weight, self.bias)
        if not self.enabled:
            return own
        low = linear(input, self.lora_A.weight.to(input.dtype)) * self.scale  # (…, r)
        return own + linear(low, self.lora_B.weight.to(input.dtype))


class Adapter:
    """All adapters of one model."""

    def __init__(self, layers: Mapping[str, LoRALinear]) -> None:
        self._layers = dict(layers)

    @property
    def layers(self) -> Mapping[str, LoRALinear]:
        """By name."""
        return self._layers

    def tensors(self) -> dict[str, Tensor]:
        """The masters themselves, by name, sorted."""
        pairs = {name + A: layer.lora_A.weight.detach() for name, layer in self._layers.items()}
        pairs |= {name + B: layer.lora_B.weight.detach() for name, layer in self._layers.items()}
        return dict(sorted(pairs.items()))

    @contextmanager
    def off(self) -> Iterator[None]:
        """The model is the base inside."""
        for layer in self._layers.values():
            layer.enabled = False
        try:
            yield
        finally:
            for layer in self._layers.values():
                layer.enabled = True


def scale_of(settings: LoRA) -> float:
    """alpha / rank."""
    return settings.alpha / settings.rank


def targets_of(model: nn.Module, settings: LoRA) -> dict[str, nn.Linear]:
    """The linear layers whose names end with one of the target modules, by name, sorted.

    Raises: UserError if a target names nothing, or what can have no adapter; if no target has so many ranks, or
    alpha / rank is no float32 number.
    """
    head = model.get_output_embeddings()  # type: ignore[operator]
    found = {t: _named(model, t) for t in settings.target_modules}
    missing = [target for target, modules in found.items() if not modules]
    if missing or not found:
        linears = {n.rpartition(".")[2] for n, m in model.named_modules() if type(m) is nn.Linear and m is not head}
        remedy = f"choose among {sorted(linears)}" if linears else "this model has no linear layer; remove model.lora"
        raise UserError(f"model.lora.targetModules: no module is named {missing}: {remedy}")
    modules = dict(sorted((n, m) for named in found.values() for n, m in named.items()))
    # One adapter would be beside one of two modules that share a weight, and merging would change both.
    holders = Counter(id(getattr(m, "weight", None)) for parent in model.modules() for m in parent.children())
    for name, module in modules.items():
        plain = type(module) is nn.Linear and module is not head
        if not plain or holders[id(module.weight)] > 1:
            kind = "the output embedding" if module is head else f"a {type(module).__name__}"
            raise UserError(
                f"model.lora.targetModules: {name} is {kind}{' that shares its weight' if plain else ''}: "
                "adapters go on linear layers within the decoder alone"
            )
    targets = {n: m for n, m in modules.items() if isinstance(m, nn.Linear)}
    most = max(min(m.in_features, m.out_features) for m in targets.values())
    if settings.rank > most:
        raise UserError(f"model.lora.rank must be <= {most}, the side of its targets, got {settings.rank}: lower it")
    if scale_of(settings) > torch.finfo(torch.float32).max:
        raise UserError(f"model.lora.alpha / rank must be a float32 number, got {scale_of(settings):g}: lower alpha")
    return targets


def try_targets(model: nn.Module, settings: LoRA) -> None:
    """Find out before a run is recorded whether its adapters can learn. Raises: UserError as `targets_of`, or if not.

    Computes two tokens where the model lies, if it can there: some kernels want a GPU, and `AdaptedPolicy` looks again.
    """
    targets = targets_of(model, settings)
    decoder: nn.Module = model.get_decoder()  # type: ignore[operator]
    place = model.get_input_embeddings().weight.device  # type: ignore[operator]
    with torch.no_grad(), recording_calls(targets) as called:
        try:
            decoder(input_ids=torch.zeros((1, 2), dtype=torch.int64, device=place), use_cache=False)
        except Exception:  # whatever a kernel raises that is not for this place
            return
    refuse_uncalled(targets, called)


@contextmanager
def recording_calls(modules: Mapping[str, nn.Module]) -> Iterator[set[str]]:
    """The names of the modules that are called within."""
    called: set[str] = set()

    def note(name: str) -> Callable[..., None]:
        return lambda *_: called.add(name)

    hooks = [module.register_forward_hook(note(name)) for name, module in modules.items()]
    try:
        yield called
    finally:
        for hook in hooks:
            hook.remove()


def refuse_uncalled(targets: Collection[str], called: Collection[str]) -> None:
    """`called`: what a forward pass calls. Where the model reads a weight itself, an adapter would stay untrained.

    Of targets whose names differ in numbers alone one call is enough: no short pass goes to all experts of a mixture.
    Raises: UserError.
    """
    silent = sorted({_kind(name) for name in targets} - {_kind(name) for name in called})
    if silent:
        raise UserError(
            f"model.lora.targetModules: the model reads the weight of {', '.join(silent)} and never calls it, so "
            "an adapter there would never be trained: take it out of targetModules"
        )


def _kind(name: str) -> str:
    return re.sub(r"\d+", "*", name)


def attach(model: nn.Module, settings: LoRA) -> Adapter:
    """Freeze the model and give an adapter to each of its targets. Raises: UserError as `targets_of`."""
    layers = {name: LoRALinear(name, module, settings) for name, module in targets_of(model, settings).items()}
    model.requires_grad_(False)
    for name, layer in layers.items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, layer)
    return Adapter(layers)


@torch.no_grad()
def merged(base: Mapping[str, Tensor], adapter: Mapping[str, Tensor], *, scale: float) -> dict[str, Tensor]:
    """The base's tensors with W + s·B·A, computed in float32 and rounded once to W's dtype, where there is an adapter.

    Host tensors are pinned if this process uses CUDA; the others are the base's own.
    Raises: CorruptObject if the adapter is none of this base.
    """
    tensors = dict(base)
    names = {name.removesuffix(A) for name in adapter if name.endswith(A)}
    if not names or {name + end for name in names for end in (A, B)} != set(adapter):
        raise CorruptObject(f"an adapter must hold pairs of {A} and {B}, got {sorted(adapter)[:4]}")
    for name in sorted(names):
        first, second, weight = adapter[name + A], adapter[name + B], base.get(f"{name}.weight")
        if weight is None or weight.shape != (second.shape[0], first.shape[1]) or first.shape[0] != second.shape[1]:
            shape = None if weight is None else list(weight.shape)
            raise CorruptObject(
                f"the adapter of {name}, {list(second.shape)} x {list(first.shape)}, does not fit its base: {shape}"
            )
        pinned = weight.device.type == "cpu" and torch.cuda.is_initialized()  # pinning alone would start it
        target = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device, pin_memory=pinned)
        target.copy_(torch.addmm(weight.float(), second.float(), first.float(), alpha=scale))
        tensors[f"{name}.weight"] = target
    return tensors


def peft_files(
    adapter: Mapping[str, Tensor], settings: LoRA, *, uri: str | None, revision: str | None
) -> tuple[dict[str, Tensor], dict[str, object]]:
    """Tensors and adapter_config.json as PEFT reads them.

    `uri`, `revision`: of the model that the adapter goes on, which `from_pretrained` finds for hf:// and file://; None:
    it has no such name.
    """
    scheme, _, rest = (uri or "").partition("://")
    tensors = {f"base_model.model.{name}": tensor.contiguous() for name, tensor in adapter.items()}
    return tensors, {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": rest if scheme in ("hf", "file") else uri,
        "revision": revision if scheme == "hf" else None,
        "inference_mode": True,
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(settings.target_modules),
        "bias": "none",
        "fan_in_fan_out": False,
    }


def _named(model: nn.Module, target: str) -> dict[str, nn.Module]:
    return {n: m for n, m in model.named_modules() if n == target or n.endswith(f".{target}")}
