"""Trains again, offline, from recorded trajectories in recorded order (system.md §2: every run can be replayed).

The ingest log says which shards entered before which optimizer step, and where live settings changed; entries of a
discarded future are dropped by the lineage. On CPU, with the same configuration and thread count, the weights equal
those of the live run bit for bit, however often that one was killed and resumed.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from tba.contracts.config import LiveConfig
from tba.contracts.errors import CorruptObject, UserError
from tba.contracts.keys import INGEST, LATEST, LogKey
from tba.contracts.parse import parse_object
from tba.contracts.records import CheckpointManifest, IngestEntry, Latest, Lineage, RunRecord
from tba.models import build_model, load_weights
from tba.prompts import PromptSet, load_prompt_set
from tba.protocol.bookkeeping import Bookkeeping
from tba.protocol.lineage import is_discarded, surviving
from tba.run_record import read_run_record
from tba.snapshots import fetch_snapshot
from tba.store import NotFound, ObjectStore
from tba.trainer.adapted import make_policy
from tba.trainer.checkpoint import read_checkpoint
from tba.trainer.ingest import Binding, read_shard
from tba.trainer.learner import Learner, StepResult
from tba.trainer.startup import binding


@dataclass(frozen=True, slots=True)
class Recorded:
    """A run as its bucket tells it."""

    record: RunRecord
    latest: Latest
    checkpoint: CheckpointManifest
    version0: str
    lineage: Lineage
    entries: tuple[IngestEntry, ...]
    """Surviving entries, in order of training."""
    prompts: PromptSet

    def binding(self, model: torch.nn.Module) -> Binding:
        """What its shards may refer to."""
        return binding(self.record, self.prompts, model)


def read_recorded(store: ObjectStore) -> Recorded:
    """Raises: UserError if the prefix holds no run with a checkpoint."""
    record = read_run_record(store)
    try:
        latest = Latest.parse(store.get(LATEST).data)
    except NotFound as error:
        raise UserError(f"{store.uri} holds no run (no {error.args[0]}): pass the storage URI of a run") from error
    if latest.checkpoint is None:
        raise UserError(f"the run at {store.uri} has no checkpoint yet: wait for its first one")
    manifest, state = read_checkpoint(store, latest.checkpoint)
    lineage = surviving(manifest, latest.epoch)
    return Recorded(
        record,
        latest,
        manifest,
        str(state.facts["version0"]),
        lineage,
        tuple(surviving_entries(store, lineage)),
        load_prompt_set(store, record.train_prompts),
    )


def surviving_entries(store: ObjectStore, lineage: Lineage) -> Iterator[IngestEntry]:
    """The ingest log without discarded futures: what the final weights depend on. Raises: CorruptObject."""
    for info in store.list_after(INGEST):
        epoch = LogKey.parse(info.key).epoch
        for line in store.get(info.key).data.splitlines():
            entry = parse_object(IngestEntry, f"a line of {info.key}", line)
            if epoch in lineage.resume_steps and not is_discarded(lineage, epoch, entry.before_step):
                yield entry


def replay(
    store: ObjectStore,
    *,
    steps: int | None = None,
    on_step: Callable[[Learner, StepResult], None] | None = None,
) -> Learner:
    """Train from version 0 for `steps` (default: to the newest checkpoint) over the recorded shards.

    Raises: CorruptObject if a recorded shard cannot be read any more, or a batch not be drawn from them again;
    UserError without a run, or if it has fewer steps.
    """
    recorded = read_recorded(store)
    last = _last_step(store, recorded, steps)
    live = _unpaced(recorded.record.live)
    learner = _begin(store, recorded)
    book = Bookkeeping(epoch=recorded.latest.epoch, lineage=recorded.lineage)
    pending = list(reversed(recorded.entries))
    for step in range(1, last + 1):
        while pending and pending[-1].before_step <= step:
            entry = pending.pop()
            if entry.live is not None:
                live = _unpaced(entry.live)
                learner.buffer.set_max_trajectories(live.buffer.max_trajectories)
            else:
                _ingest(store, recorded, learner, book, entry)
        _refuse_undrawable(store, learner, live)
        result = learner.train_step(live, _epoch_of(recorded.lineage, step))
        # `step` of the bookkeeping is what trajectories may claim; the recorded run has checked that already.
        book = replace(book, step=recorded.checkpoint.step)
        if on_step is not None:
            on_step(learner, result)
    return learner


def weights_that_differ(store: ObjectStore, learner: Learner) -> list[str] | None:
    """Tensors that differ in any bit from the newest checkpoint's masters; None if that is of another step."""
    latest = Latest.parse(store.get(LATEST).data)
    if latest.checkpoint is None:
        return None
    manifest, state = read_checkpoint(store, latest.checkpoint)
    if manifest.step != learner.step:
        return None
    mine = learner.policy.master_state()
    return [name for name, tensor in state.tensors["master"].items() if not torch.equal(mine[name], tensor)]


def _last_step(store: ObjectStore, recorded: Recorded, steps: int | None) -> int:
    """Raises: UserError for a step that the run never took, or that no checkpoint has made durable yet."""
    taken = recorded.checkpoint.step
    if steps is not None and steps > taken:
        raise UserError(
            f"the run at {store.uri} has {taken} steps up to its newest checkpoint, got --steps {steps}: "
            "ask for no more, or leave --steps out to replay them all"
        )
    return taken if steps is None else steps


def _unpaced(live: LiveConfig) -> LiveConfig:
    """Without the limit that says when a batch may be drawn but not which: the run did draw, whatever it was then."""
    return live.model_copy(update={"buffer": live.buffer.model_copy(update={"max_replay_ratio": None})})


def _refuse_undrawable(store: ObjectStore, learner: Learner, live: LiveConfig) -> None:
    """Raises: CorruptObject if the next batch, which the run drew, cannot be drawn."""
    missing = learner.waiting_for(live)
    if missing is not None:
        raise CorruptObject(
            f"step {learner.step + 1} of the run at {store.uri} cannot be drawn again from its ingest log, for want of "
            f"{missing}. Replay what came before with --steps {learner.step}"
        )


def _ingest(store: ObjectStore, recorded: Recorded, learner: Learner, book: Bookkeeping, entry: IngestEntry) -> None:
    if entry.synced:
        learner.sampler.on_sync(learner.buffer, extend=entry.extended)
        return
    if entry.quarantined is not None:
        return
    try:
        arrival = read_shard(store, entry.key, recorded.binding(learner.policy.model))
    except NotFound as error:
        raise CorruptObject(
            f"{entry.key} of the run at {store.uri} has gone, and step {entry.before_step} was drawn with it: "
            "shards stay for a replay with storage.trajectoryRetention Keep alone, and while nobody deletes them"
        ) from error
    if arrival.batch is None:
        raise CorruptObject(f"{entry.key} was ingested with {entry.num_rows} rows, now: {arrival.reason}")
    learner.ingest_shard(entry.key, arrival.batch, replace(book, step=recorded.checkpoint.step))


def _begin(store: ObjectStore, recorded: Recorded) -> Learner:
    snapshot = fetch_snapshot(store, recorded.version0)
    config = recorded.record.config
    model, _ = build_model(
        snapshot.assets, dtype=torch.float32, device="cpu", trust_remote_code=config.model.trust_remote_code
    )
    load_weights(model, snapshot.tensors)
    policy = make_policy(
        model, config=config.model, reference=config.objective.reference, temperature=config.objective.temperature
    )
    return Learner(policy, config)


def _epoch_of(lineage: Lineage, step: int) -> int:
    """The epoch that trained surviving step `step`."""
    return max(e for e, resumed in lineage.resume_steps.items() if resumed < step or resumed == 0)
