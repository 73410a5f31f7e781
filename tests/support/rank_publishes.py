"""Publishes a tiny model as two ranks do, each its part, beside what rank 0 would gather.

python rank_publishes.py STORE FOLDER RECIPE VERSIONS    rank 0, which starts the other: python rank_publishes.py
RANK_FAILPOINTS: of the other rank. RANK_STORE: what it finds in place of the store.
"""

import os
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from support.learning import feed, make_shard, tiny_llama
from support.rank_runs import RECIPES, SHARDS, config_of, live_of
from support.synthetic_run import RUN_ID, run_record

from tba import failpoints
from tba.cli.exit import end_process
from tba.contracts.config import Delta
from tba.contracts.keys import RUN
from tba.models import weight_tensors
from tba.store import ObjectStore, open_store
from tba.trainer.committer import Committer
from tba.trainer.learner import Learner
from tba.trainer.publish import Published, Publisher
from tba.trainer.rank import Bucket, order_build, serve, upload_parts
from tba.trainer.rankprocesses import join_as_child
from tba.trainer.ranks import Ranks
from tba.trainer.sharded_adapted import make_sharded_policy
from tba.trainer.team import Team

LOST = 7
"""Exit code of rank 0 when the other has ended."""


def _lost(told: str) -> None:
    print(told, file=sys.stderr, flush=True)
    os._exit(LOST)


def _told(done: Published) -> None:
    print("PUBLISHED", done.manifest.version, done.row.encoding, done.key, flush=True)


def publish(uri: str, folder: Path, recipe: str, versions: int) -> None:
    """Version 0 and one a step, each after its tensors as rank 0 gathers them are in `folder`."""
    store = open_store(uri)
    store.put_once(RUN, run_record().to_json())
    team = Team(2, [sys.executable, __file__], on_loss=_lost)
    in_order = False
    try:
        _publish(store, team.ranks, folder, recipe, versions)
        in_order = True
    finally:
        team.close(code=0, in_order=in_order)


def _publish(store: ObjectStore, ranks: Ranks, folder: Path, recipe: str, versions: int) -> None:
    config = config_of(RECIPES[recipe])
    torch.manual_seed(0)
    order_build(ranks, config.model, config.objective, {}, Bucket(store.uri, RUN_ID))
    policy = make_sharded_policy(
        tiny_llama(),
        config=config.model,
        reference=config.objective.reference,
        temperature=config.objective.temperature,
        ranks=ranks,
    )
    parts = upload_parts(ranks, list(weight_tensors(tiny_llama())))
    learner = Learner(policy, config, ranks)
    feed(learner, *map(make_shard, SHARDS))
    committer = Committer.take_over(store)
    publisher = Publisher(
        store, committer, assets={"config.json": b"{}"}, delta=lambda: Delta(max_ratio=1.0, anchor_every=3),
        give_up_seconds=60.0, on_published=_told, parts=parts,
    )  # fmt: skip
    for version in range(versions):
        if version:
            learner.train_step(live_of(RECIPES[recipe]), epoch=1)
        save_file({n: t.contiguous() for n, t in policy.stage().items()}, folder / f"{version}.safetensors")
        staged = policy.stage((0,) if parts is None else parts.owners)
        print("STAGED", sum(t.nbytes for t in staged.values()), flush=True)
        publisher.publish(staged, version=version, epoch=committer.epoch, evaluation=None, stage_seconds=0.0)
        if version == versions - 1:  # the others are uploaded beside the next step
            publisher.background.join()


def main() -> None:
    torch.set_num_threads(1)
    if len(sys.argv) > 1:
        publish(sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
        return
    failpoints.configure(os.environ.get("RANK_FAILPOINTS", ""))
    serve(
        join_as_child(),
        lambda bucket: open_store(os.environ.get("RANK_STORE") or bucket.uri),
        build=lambda _assets, _trust: tiny_llama(),
    )


if __name__ == "__main__":
    main()
    end_process(0)
