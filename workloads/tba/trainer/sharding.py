"""What policies over several ranks have in common: shards by FSDP2, filled and gathered, and what rank 0 found out.

```
shards ─ cast ─ gather ─► layer (working dtype) ─► forward, backward ─ sum over ranks, float32 ─► shards
```
"""

import copy
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from tba.contracts.config import TrainerSettings
from tba.contracts.errors import UserError
from tba.scoring import Layout, Rows, Scorer
from tba.trainer.memory import activation_bytes, local
from tba.trainer.optim import shard_like
from tba.trainer.ranks import Ranks
from tba.trainer.recomputation import Recomputation, layers_of
from tba.trainer.shares import assign
from tba.trainer.working import cast_parameters


@dataclass(frozen=True, slots=True)
class Choice:
    """How rank 0 found that this model computes best."""

    layout: Layout
    refused: dict[Layout, str]
    bytes_per_token: dict[Recomputation, float] | None
    """Of activations, on a GPU."""

    def scorer(self, model: nn.Module, temperature: float) -> Scorer:
        """One that computes so."""
        scorer = Scorer(model, temperature=temperature, layout=self.layout)
        scorer.refused = dict(self.refused)
        return scorer


def agreed_choice(model: nn.Module, dtype: torch.dtype, temperature: float, ranks: Ranks) -> Choice:
    """What rank 0 finds with all weights in one place, on all ranks: layers cannot run alone once they are shards.

    Raises: UserError if rows cannot be packed.
    """
    found = _try_out(model, dtype, temperature, ranks) if ranks.leads else None
    choice = Choice(**json.loads(ranks.say("" if found is None else json.dumps(asdict(found)))))
    if choice.layout == "padded":
        raise UserError(
            f"{type(model).__name__} cannot compute packed rows, which several ranks need: "
            f"set trainer.gpusPerNode: 1 ({choice.refused})"
        )
    return choice


def shard(
    model: nn.Module, scorer: Scorer, ranks: Ranks, *, dtype: torch.dtype, whole: Iterable[nn.Parameter] = ()
) -> nn.Module:
    """A module whose call scores rows in `dtype`; the parameters of `model` are shards from now on, but for `whole`."""
    kept = set(whole)
    shorter = dtype if any(p.dtype != dtype for p in model.parameters() if p not in kept) else None
    precision = MixedPrecisionPolicy(shorter, torch.float32, cast_forward_inputs=False)
    root = _Scoring(model, scorer)
    for module in (*layers_of(model), root):
        # Gathered anew after each forward pass, the root too: else it would keep old weights over a step.
        fully_shard(module, mesh=ranks.mesh, mp_policy=precision, reshard_after_forward=True, ignored_params=kept)
    for module in root.modules():
        if isinstance(module, FSDPModule):  # each rank's share is of the whole batch: gradients add up
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return root


@torch.no_grad()
def fill(own: Mapping[str, Tensor], tensors: Mapping[str, Tensor] | None, ranks: Ranks) -> None:
    """Give `own` the values of rank 0's tensors of the same names; other ranks give None."""
    for name, given in ranks.stream(tensors):
        target, placed = own[name], given.to(ranks.device)
        local(target).copy_(local(shard_like(target, placed)) if isinstance(target, DTensor) else placed)


@torch.no_grad()
def gather(
    tensors: Iterable[tuple[str, Tensor]], ranks: Ranks, owners: Mapping[str, int] | None = None
) -> dict[str, Tensor]:
    """Host copies of this rank's, one tensor at a time. `owners`: rank by name; null: rank 0 has all."""
    gathered: dict[str, Tensor] = {}
    for name, tensor in tensors:
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if ranks.rank == (0 if owners is None else owners[name]):
            gathered[name] = whole.detach().to("cpu", copy=True)
    return gathered


def share(tensors: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype], owners: Sequence[int]) -> dict[str, int]:
    """Which of `owners` stages which of `tensors`, in `dtypes`: the same on all ranks, however they are sharded."""
    return assign({name: math.prod(t.shape) * dtypes[name].itemsize for name, t in tensors.items()}, owners)


def refuse_alone(settings: TrainerSettings, ranks: Ranks) -> None:
    """Raises: UserError for what one GPU alone can do."""
    asked = {"compile": settings.compile, "offloadReference": settings.offload_reference}
    if refused := [name for name, wanted in asked.items() if wanted]:
        raise UserError(f"trainer.{refused[0]}: true works on one GPU, got {ranks.size} ranks: set it false")


def _try_out(model: nn.Module, dtype: torch.dtype, temperature: float, ranks: Ranks) -> Choice:
    working = copy.deepcopy(model)
    cast_parameters(working, dtype)
    scorer = Scorer(working.to(ranks.device), temperature=temperature)
    measured = activation_bytes(working, scorer) if ranks.device.type == "cuda" else None
    return Choice(scorer.layout, scorer.refused, measured)


class _Scoring(nn.Module):
    """Root of FSDP2's modules: embeddings and output embedding are whole within its call."""

    def __init__(self, model: nn.Module, scorer: Scorer) -> None:
        super().__init__()
        self.model = model
        self._scorer = scorer

    def forward(self, rows: Rows) -> Tensor:
        """Sums over response tokens: (B,) float32."""
        return self._scorer.sequence_logprobs(rows)
