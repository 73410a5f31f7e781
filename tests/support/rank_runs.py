"""Trains a tiny model by each of some recipes, with one rank or several, and saves what came of it.

python rank_runs.py RANKS FOLDER RECIPE...       rank 0, which starts the others of its node: python rank_runs.py
python rank_runs.py node NODE_RANK RANKS         another node: where and how many nodes, the environment says
"""

import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from support.learning import feed, live_config, make_shard, run_config, tiny_llama
from support.scoring import tiny

from tba.cli.exit import end_process
from tba.contracts.config import LoRA, RunConfig
from tba.contracts.errors import LeftAlone, UserError
from tba.contracts.records import Lineage
from tba.stop import stop_signals
from tba.store import ObjectStore
from tba.trainer.adapted import make_policy
from tba.trainer.checkpoint import TrainerState
from tba.trainer.learner import Learner, new_rows
from tba.trainer.node import Node
from tba.trainer.nodelink import Hello
from tba.trainer.nodes import Nodes
from tba.trainer.rank import Bucket, order_build, serve
from tba.trainer.rankprocesses import join_as_child
from tba.trainer.sharded_adapted import make_sharded_policy
from tba.trainer.team import Team

STEPS = 4
NUM_NODES = int(os.environ.get("NUM_NODES", "1"))
HOST, PORT = os.environ.get("NODE_0", "127.0.0.1"), int(os.environ.get("NODE_0_PORT", "0"))
TOKEN = "of the test"


@dataclass(frozen=True)
class Recipe:
    """A way to train."""

    objective: dict
    micro_batch_tokens: int = 4096
    dtype: str = "float32"
    checkpointing: str = "Auto"
    adapted: bool = False


RECIPES = {
    "plain": Recipe({}),
    "oversized": Recipe({"promptsPerBatch": 2}, micro_batch_tokens=12),
    "one_group": Recipe({"promptsPerBatch": 1}),
    "ratio": Recipe({"parameters": {"ratioAlpha": 0.5, "ratioClip": 2.0}}, micro_batch_tokens=30),
    "ema": Recipe({"reference": {"type": "EMA", "decay": 0.5}}),
    "reset": Recipe({"reference": {"type": "Reset", "everySteps": 2}}),
    "clipped": Recipe({"optimizer": {"maxGradNorm": 0.01}}),
    "recomputed": Recipe({}, micro_batch_tokens=30, checkpointing="Always"),
    "selective": Recipe({}, micro_batch_tokens=30, dtype="bfloat16", checkpointing="Selective"),
    "bfloat16": Recipe({}, micro_batch_tokens=30, dtype="bfloat16"),
    "adapter": Recipe({"optimizer": {"maxGradNorm": 0.01}}, micro_batch_tokens=30, adapted=True),
    "adapter_recomputed": Recipe(
        {"promptsPerBatch": 1}, micro_batch_tokens=12, dtype="bfloat16", checkpointing="Always", adapted=True
    ),
}
LORA = LoRA(rank=4, alpha=8, target_modules=["q_proj", "v_proj", "down_proj"])
SHARDS = (0, 1)
UNPACKABLE = "file:///bloom"
"""Model that several ranks refuse."""


def config_of(recipe: Recipe) -> RunConfig:
    config = run_config(**recipe.objective)
    changes = {"dtype": recipe.dtype, "lora": LORA if recipe.adapted else None}
    return config.model_copy(update={"model": config.model.model_copy(update=changes)})


def live_of(recipe: Recipe):
    live = live_config(micro_batch_tokens=recipe.micro_batch_tokens)
    settings = live.trainer.model_copy(update={"activation_checkpointing": recipe.checkpointing})
    return live.model_copy(update={"trainer": settings})


@contextmanager
def learners(num_ranks: int):
    """A maker of learners, each over all ranks."""
    if num_ranks == NUM_NODES == 1:
        yield _alone
        return
    nodes = gathered(num_ranks)
    team = Team(num_ranks, [sys.executable, __file__], on_loss=_lost, nodes=nodes)
    code = 1
    try:
        yield lambda config: _spread(config, team)
        code = 0
    except SystemExit as end:
        code = end.code
        raise
    finally:
        team.close(code=code, in_order=code == 0)


def gathered(num_ranks: int) -> Nodes | None:
    """The other nodes of `NUM_NODES`."""
    if NUM_NODES == 1:
        return None
    nodes = Nodes(NUM_NODES, num_ranks, port=PORT, token=TOKEN, on_leave=_left, on_loss=_lost)
    assert nodes.gather(seconds=60, stopping=lambda: False)
    return nodes


def _left(node: int) -> None:
    print(f"node {node} is asked to end", file=sys.stderr, flush=True)


def serve_node(node_rank: int, num_ranks: int) -> int:
    """As another node."""
    hello, argv = Hello(node_rank, NUM_NODES, num_ranks), [sys.executable, __file__]
    try:
        with stop_signals() as stop:
            return Node(hello, (HOST, PORT), TOKEN, argv, stopping=stop.is_set).run(join_seconds=60)
    except LeftAlone as error:
        print(error, file=sys.stderr, flush=True)
        return error.exit_code


def _lost(told: str) -> None:
    print(told, file=sys.stderr, flush=True)
    os._exit(7)


def _alone(config: RunConfig) -> Learner:
    torch.manual_seed(0)
    objective = config.objective
    policy = make_policy(
        tiny_llama().to("cuda" if torch.cuda.is_available() else "cpu"),
        config=config.model,
        reference=objective.reference,
        temperature=objective.temperature,
    )
    return Learner(policy, config)


def _spread(config: RunConfig, team: Team) -> Learner:
    torch.manual_seed(0)
    objective, ranks = config.objective, team.ranks
    unpackable = config.model.uri == UNPACKABLE
    order_build(ranks, config.model, objective, {UNPACKABLE: b""} if unpackable else {})
    policy = make_sharded_policy(
        bloom() if unpackable else tiny_llama(),
        config=config.model,
        reference=objective.reference,
        temperature=objective.temperature,
        ranks=ranks,
    )
    return Learner(policy, config, ranks)


def train(learner: Learner, recipe: Recipe, steps: int) -> dict[str, torch.Tensor]:
    """What `steps` steps gave, and the learner's state."""
    results: dict[str, torch.Tensor] = {}
    for _ in range(steps):
        step = learner.train_step(live_of(recipe), epoch=1)
        for name in ("ell", "weights", "log_z"):
            results[f"{name}/{learner.step}"] = torch.from_numpy(getattr(step, name).copy())
        numbers = [step.loss, step.update.grad_norm, step.trained_tokens, step.scored_tokens]
        results[f"numbers/{learner.step}"] = torch.tensor(numbers, dtype=torch.float64)
    return results | {f"staged/{n}": t for n, t in learner.policy.stage().items()} | tensors_of(learner.state())


def bloom() -> torch.nn.Module:
    return tiny("bloom", n_layer=2, n_head=4)


def tensors_of(state: TrainerState) -> dict[str, torch.Tensor]:
    return {f"{file}/{name}": t.contiguous() for file, tensors in state.tensors.items() for name, t in tensors.items()}


def resume(learner: Learner, folder: Path, recipe: str, step: int) -> None:
    """Go on where the state in `folder` ended."""
    flat, tensors = load_file(folder / f"resume_{recipe}.safetensors"), {}
    for name, tensor in flat.items():
        file, _, rest = name.partition("/")
        tensors.setdefault(file, {})[rest] = tensor
    from json import loads

    shards = {s.header.id: s for s in map(make_shard, SHARDS)}
    state = TrainerState(tensors, loads((folder / f"resume_{recipe}.json").read_text()))
    learner.restore(state, step, lambda ids: [new_rows(shards[i], Lineage()) for i in ids])


def keep(learner: Learner, folder: Path, recipe: str) -> None:
    """For `resume`."""
    from json import dumps

    state = learner.state()
    save_file(tensors_of(state), folder / f"resume_{recipe}.safetensors")
    (folder / f"resume_{recipe}.json").write_text(dumps(state.facts))


def run(make: Callable[[RunConfig], Learner], name: str, folder: Path) -> dict[str, torch.Tensor]:
    if name.startswith("resume"):  # resume:FROM_STEP:RECIPE
        _, step, chosen = name.split(":")
        start, recipe = int(step), RECIPES[chosen]
        learner = make(config_of(recipe))
        if start:
            resume(learner, folder, chosen, start)
        else:
            feed(learner, *map(make_shard, SHARDS))
        results = train(learner, recipe, 2)
        keep(learner, folder, chosen)
        return results
    recipe = RECIPES[name]
    learner = make(config_of(recipe))
    feed(learner, *map(make_shard, SHARDS))
    return train(learner, recipe, STEPS)


def train_forever(make: Callable[[RunConfig], Learner]) -> None:
    """Say so on standard error, after a first step."""
    learner = make(config_of(RECIPES["plain"]))
    feed(learner, *map(make_shard, SHARDS))
    while True:
        learner.train_step(live_of(RECIPES["plain"]), epoch=1)
        if learner.step == 1:
            print("training", file=sys.stderr, flush=True)


def refuse(make: Callable[[RunConfig], Learner]) -> None:
    """A model that no rank takes; this one is slow to end."""
    try:
        config = config_of(RECIPES["plain"])
        make(config.model_copy(update={"model": config.model.model_copy(update={"uri": UNPACKABLE})}))
    except UserError as error:
        print(error, file=sys.stderr, flush=True)
        time.sleep(3.0)
        raise SystemExit(error.exit_code) from error


def _no_bucket(bucket: Bucket) -> ObjectStore:
    raise UserError(f"these runs publish nothing, got {bucket}")


def serve_told() -> None:
    """As a rank other than 0: with its exit code, and saying whether it has left."""

    def build(assets: Mapping[str, bytes], _trust: bool) -> torch.nn.Module:
        if not assets:
            return tiny_llama()
        sys.setswitchinterval(1000.0)  # starves the threads of its groups until it ends
        return bloom()

    try:
        serve(join_as_child(), _no_bucket, build=build)
    except UserError as error:
        raise SystemExit(error.exit_code) from error
    print("rank stayed" if torch.distributed.is_initialized() else "rank left", file=sys.stderr, flush=True)


def main() -> None:
    torch.set_num_threads(1)
    if len(sys.argv) == 1:
        serve_told()
        return
    if sys.argv[1] == "node":
        raise SystemExit(serve_node(int(sys.argv[2]), int(sys.argv[3])))
    num_ranks, folder = int(sys.argv[1]), Path(sys.argv[2])
    with learners(num_ranks) as make:
        for name in sys.argv[3:]:
            if name == "forever":
                train_forever(make)
            if name == "refused":
                refuse(make)
            save_file(run(make, name, folder), folder / f"{name}.safetensors")


if __name__ == "__main__":
    try:
        main()
    except SystemExit as end:
        end_process(end.code if isinstance(end.code, int) else 0)
