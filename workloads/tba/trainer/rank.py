"""A rank other than 0: computes its share of each step and keeps its shards of weights and moments.

It has no buffer and no random numbers, and reads nothing: all it needs comes from rank 0 (`ranks`). Into the bucket
it writes the data objects of its part of each snapshot (`uploader`), and nothing else.
"""

import os
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from tba.contracts.config import Model, Objective, TrainerSettings
from tba.contracts.errors import StoreUnavailable, UserError
from tba.log import UPLOAD_DELEGATED, log
from tba.models import build_model
from tba.objectives import lookup
from tba.run_record import find_run_record
from tba.snapshots.encode import codec_threads
from tba.store import ObjectStore
from tba.trainer.batchrows import BatchRows
from tba.trainer.collate import Collator
from tba.trainer.gradient import BatchGradient
from tba.trainer.optim import Optimizer
from tba.trainer.parts import Parts
from tba.trainer.ranks import END_SECONDS, Order, Ranks
from tba.trainer.sharded_adapted import make_sharded_policy
from tba.trainer.stopwatch import Stopwatch
from tba.trainer.uploader import Uploader

BuildModel = Callable[[Mapping[str, bytes], bool], nn.Module]
"""(assets, whether to trust their code) -> an unfilled float32 model in host memory."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Where the run's objects are."""

    uri: str
    run_id: str
    """Of its run.json, by which a rank sees that it has found them."""


OpenBucket = Callable[[Bucket], ObjectStore]
"""Raises: UserError if there is no way to it from here."""


def from_assets(assets: Mapping[str, bytes], trust_remote_code: bool) -> nn.Module:
    """The model that a snapshot's assets describe."""
    return build_model(assets, dtype=torch.float32, device="cpu", trust_remote_code=trust_remote_code)[0]


def serve(ranks: Ranks, open_bucket: OpenBucket, *, build: BuildModel = from_assets) -> None:
    """Obey rank 0 until it ends, and leave. Raises: RuntimeError if it, or another rank, has gone."""
    rank: Rank | None = None
    while (order := ranks.next_order()).kind != "end":
        if order.kind == "build":
            rank = Rank(order, ranks, open_bucket, build)
        elif rank is None:
            raise RuntimeError(f"rank 0 ordered {order.kind!r} before a model was built")
        else:
            rank.obey(order)
    ranks.close()


class Rank:
    """Policy and optimizer of one rank, as far as they are its own."""

    def __init__(self, order: Order, ranks: Ranks, open_bucket: OpenBucket, build: BuildModel) -> None:
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
        self._uploader = None
        if order.facts["bucket"] is not None:
            self._uploader = _uploader(Bucket(**order.facts["bucket"]), ranks, open_bucket)

    def obey(self, order: Order) -> None:
        """Do what rank 0 does now. Raises: FloatingPointError, UserError where rank 0 raises them too."""
        if order.kind == "step":
            self._step(order)
        elif order.kind == "stage":
            self._stage(order.facts["owners"])
        elif order.kind == "state":
            self._policy.master_state()
            self._policy.reference_state()
            self._optimizer.state(keep=False)
        elif order.kind == "restore":
            self._policy.restore(None, None)
            self._optimizer.restore(self._ranks.stream(None), order.facts["grad_norms"])
        else:
            raise RuntimeError(f"rank 0 ordered {order.kind!r}, which this rank does not know")

    def _stage(self, owners: Sequence[int]) -> None:
        uploader = self._uploader if self._ranks.rank in owners else None
        if uploader is not None:
            uploader.join()  # what it held of the publish before the last is gone before more is staged
        staged = self._policy.stage(owners)
        if uploader is not None:
            uploader.start(staged)

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


def order_build(
    ranks: Ranks, model: Model, objective: Objective, assets: Mapping[str, bytes], bucket: Bucket | None = None
) -> None:
    """Have the other ranks build the model that `assets` describe: rank 0 makes its policy next.

    `bucket`: to which each uploads its part of snapshots, `upload_parts` next; null: rank 0 alone does.
    """
    arrays = {name: np.array(bytearray(data), np.uint8) for name, data in assets.items()}
    facts = {
        "model": _json(model),
        "objective": _json(objective),
        "bucket": None if bucket is None else asdict(bucket),
    }
    ranks.order("build", facts, arrays)


def upload_parts(ranks: Ranks, names: Collection[str]) -> Parts | None:
    """As rank 0, after making its policy of an `order_build` with a bucket: who has found that; None if nobody has.

    `names`: of all tensors of a snapshot.
    """
    others = [rank for rank in ranks.who(True) if rank != 0]
    if not others:
        return None
    return Parts({rank: ranks.channel(rank) for rank in others}, names, num_threads=codec_threads(ranks.on_host))


def step_facts(settings: TrainerSettings, *, beta: float, step: int, epoch: int) -> dict[str, Any]:
    """Facts of the order to take optimizer step `step`; its arrays are those of `batchrows.pack_batch`."""
    return {"settings": _json(settings), "beta": beta, "step": step, "epoch": epoch}


def _uploader(bucket: Bucket, ranks: Ranks, open_bucket: OpenBucket) -> Uploader | None:
    """None if this rank does not reach the bucket: its share is dealt to others. All ranks but 0 at once."""
    store, problem = None, ""
    try:
        store = open_bucket(bucket)
        record = find_run_record(store)
        if record is None or record.run_id != bucket.run_id:
            problem = f"{bucket.uri} holds another run here, or none: this host does not share it with rank 0's"
    except (UserError, StoreUnavailable) as error:
        problem = str(error)
    if problem:
        log.warning(UPLOAD_DELEGATED, rank=ranks.rank, reason=problem)
    ranks.who(not problem)
    if problem or store is None:
        return None
    threads = codec_threads(ranks.on_host)
    return Uploader(store, ranks.channel(0), rank=ranks.rank, on_loss=_end_after_rank_0, num_threads=threads)


def _end_after_rank_0(error: BaseException) -> None:
    """In a thread: rank 0 waits for what this rank was to upload, and the main thread waits for rank 0.

    If it is rank 0 that has gone, the main thread knows and leaves as it should before this returns.
    """
    time.sleep(END_SECONDS)
    traceback.print_exception(error)
    os._exit(1)


def _json(contract: Model | Objective | TrainerSettings) -> dict[str, Any]:
    return contract.model_dump(mode="json", by_alias=True)
