"""A rank other than 0: computes its share of each step and keeps its shards of weights and moments.

It has no store, no buffer and no random numbers: all that it needs comes from rank 0 (`ranks`).
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from tba.contracts.config import Model, Objective, TrainerSettings
from tba.models import build_model
from tba.objectives import lookup
from tba.trainer.batchrows import BatchRows
from tba.trainer.collate import Collator
from tba.trainer.gradient import BatchGradient
from tba.trainer.optim import Optimizer
from tba.trainer.ranks import Order, Ranks
from tba.trainer.sharded_adapted import make_sharded_policy
from tba.trainer.stopwatch import Stopwatch

BuildModel = Callable[[Mapping[str, bytes], bool], nn.Module]
"""(assets, whether to trust their code) -> an unfilled float32 model in host memory."""


def from_assets(assets: Mapping[str, bytes], trust_remote_code: bool) -> nn.Module:
    """The model that a snapshot's assets describe."""
    return build_model(assets, dtype=torch.float32, device="cpu", trust_remote_code=trust_remote_code)[0]


def serve(ranks: Ranks, *, build: BuildModel = from_assets) -> None:
    """Obey rank 0 until it ends, and leave. Raises: RuntimeError if it, or another rank, has gone."""
    rank: Rank | None = None
    while (order := ranks.next_order()).kind != "end":
        if order.kind == "build":
            rank = Rank(order, ranks, build)
        elif rank is None:
            raise RuntimeError(f"rank 0 ordered {order.kind!r} before a model was built")
        else:
            rank.obey(order)
    ranks.close()


class Rank:
    """Policy and optimizer of one rank, as far as they are its own."""

    def __init__(self, order: Order, ranks: Ranks, build: BuildModel) -> None:
        """`order`: to build."""
        self._ranks = ranks
        config = Model.model_validate(order.facts["model"])
        self._objective = Objective.model_validate(order.facts["objective"])
        assets = {name: array.tobytes() for name, array in order.arrays.items()}
        self._policy = make_sharded_policy(
            build(assets, config.trust_remote_code),
            config=config,
            reference=self._objective.reference,
            temperature=self._objective.temperature,
            ranks=ranks,
        )
        trained = {name: p for name, p in self._policy.model.named_parameters() if p.requires_grad}
        self._optimizer = Optimizer(trained, self._objective, lora=config.lora is not None)
        self._rows = BatchRows()
        self._collator = Collator(self._rows, self._policy)

    def obey(self, order: Order) -> None:
        """Do what rank 0 does now. Raises: FloatingPointError, UserError where rank 0 raises them too."""
        if order.kind == "step":
            self._step(order)
        elif order.kind == "stage":
            self._policy.stage()
        elif order.kind == "state":
            self._policy.master_state()
            self._policy.reference_state()
            self._optimizer.state(keep=False)
        elif order.kind == "restore":
            self._policy.restore(None, None)
            self._optimizer.restore(self._ranks.stream(None), order.facts["grad_norms"])
        else:
            raise RuntimeError(f"rank 0 ordered {order.kind!r}, which this rank does not know")

    def _step(self, order: Order) -> None:
        facts = order.facts
        settings = TrainerSettings.model_validate(facts["settings"])
        self._policy.configure(settings)
        gradient = BatchGradient(
            self._policy,
            self._rows,
            self._collator,
            self._rows.take(order.arrays),
            objective=self._objective,
            loss=lookup(self._objective.type),
            beta=facts["beta"],
            stopwatch=Stopwatch(self._policy.device),
            ranks=self._ranks,
        )
        self._optimizer.zero_grad()
        gradient.run(settings.micro_batch_tokens)
        gradient.collect()
        self._optimizer.apply(facts["step"])
        self._policy.after_step(facts["step"], facts["epoch"])


def order_build(ranks: Ranks, model: Model, objective: Objective, assets: Mapping[str, bytes]) -> None:
    """Have the other ranks build the model that `assets` describe: rank 0 makes its policy next."""
    arrays = {name: np.array(bytearray(data), np.uint8) for name, data in assets.items()}
    ranks.order("build", {"model": _json(model), "objective": _json(objective)}, arrays)


def step_facts(settings: TrainerSettings, *, beta: float, step: int, epoch: int) -> dict[str, Any]:
    """Facts of the order to take optimizer step `step`; its arrays are those of `batchrows.pack_batch`."""
    return {"settings": _json(settings), "beta": beta, "step": step, "epoch": epoch}


def _json(contract: Model | Objective | TrainerSettings) -> dict[str, Any]:
    return contract.model_dump(mode="json", by_alias=True)
