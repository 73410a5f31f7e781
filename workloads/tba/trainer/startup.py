"""From a configuration directory to a trainer ready to run: open storage, claim the run, restore or begin.

```
run.json in the bucket? ── no ──► try the reward, load model.uri (or the fork's checkpoint), materialise prompts,
        │                         put run.json (once)
        │ yes: must be this job's, unchanged
        ▼
CAS latest: epoch + 1 (fences any older trainer)
        │
latest.checkpoint? ── no ──► step 0      yes ──► restore it (or the nearest readable parent)
```
"""

import os
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tba.contracts.config import LiveConfig, Prompts, RunConfig
from tba.contracts.errors import UserError
from tba.contracts.keys import CHECKPOINTS, LATEST, RUN, new_nonce, prompts_key
from tba.contracts.records import EvalRequest, ForkOrigin, Latest, RunRecord, RunState
from tba.contracts.runfile import RunFile
from tba.contracts.supported import refuse_unsupported
from tba.log import EPOCH_TAKEN, MODEL_LOADED, PROMPTS_MATERIALISED, SCORER_CHOSEN, log
from tba.lora import try_targets
from tba.models import LoadedModel, build_model, load_model, load_weights, weight_tensors
from tba.prompts import PromptSet, load_prompt_set, materialize
from tba.protocol.bookkeeping import Bookkeeping
from tba.protocol.latest import RunEnded
from tba.rewards.stored import put_reward_code
from tba.run_record import find_run_record, refuse_foreign
from tba.run_store import open_run_store
from tba.snapshots import fetch_snapshot
from tba.store import AlreadyExists, NotFound, ObjectStore, Weather
from tba.store.probe import probe, require
from tba.trainer.adapted import cast_parameters, make_policy
from tba.trainer.checkpoint import LoopFacts, restore_newest
from tba.trainer.committer import Committer
from tba.trainer.fork import load_fork
from tba.trainer.ingest import Binding
from tba.trainer.learner import Learner
from tba.trainer.model import DTYPES
from tba.trainer.parts import Parts
from tba.trainer.rank import Bucket, order_build, upload_parts
from tba.trainer.ranks import Ranks
from tba.trainer.reread import LostShard, ShardReader
from tba.trainer.scoring_policy import ScoringPolicy
from tba.trainer.sharded_adapted import make_sharded_policy
from tba.trainer.trial import try_reward

EVAL_BLOCK_PROMPTS = 64
"""Prompts of an evaluation block: small enough that a lost searcher costs little."""


@dataclass(slots=True)
class Ready:
    """A trainer that has claimed its run."""

    store: ObjectStore
    record: RunRecord
    committer: Committer
    book: Bookkeeping
    learner: Learner
    tokenizer: Any
    assets: dict[str, bytes]
    prompts: PromptSet
    fresh: bool
    """No checkpoint existed: training begins at step 0."""
    eval_request: EvalRequest | None
    facts: LoopFacts = LoopFacts(version0=None)
    lost: list[LostShard] = field(default_factory=list)
    """Shards that the restored buffer should hold rows of, and that can be read no more."""
    parts: Parts | None = None
    """The other ranks that upload a part of each snapshot; null: this process uploads all."""


class AlreadyComplete(Exception):
    """The run in the bucket has ended; there is nothing to do."""

    def __init__(self, uri: str, run_id: str, latest: Latest) -> None:
        super().__init__(f"the run at {uri} is complete at step {latest.step}")
        self.run_id = run_id
        self.latest = latest


@dataclass(frozen=True, slots=True)
class Loaded:
    """The model that a run begins with."""

    model: LoadedModel
    origin: ForkOrigin | None = None


def prepare(
    run: RunFile, live: LiveConfig, uri: str, weather: Weather | None = None, *, ranks: Ranks | None = None
) -> Ready:
    """Claim the run at `uri` and restore or begin it. `weather` is told how its storage fares, from the first request.

    `ranks`: over which the model is spread; null: it is whole in this process.

    Raises: UserError (another job's prefix, changed configuration), StoreUnavailable, AlreadyComplete.
    """
    refuse_unsupported(run.config)
    store = open_run_store(live.storage, uri, weather)
    record = find_run_record(store)
    if record is not None:
        refuse_foreign(record, run, adopt=live.storage.adopt)
    loaded: Loaded | None = None
    if record is None:
        if not live.storage.unsafe_single_trainer:
            require(probe(store))
        code = try_reward(run)
        loaded = _load(run, live)
        record = _create_record(store, run, live, loaded, code)
    _refuse_ended(store, record)
    committer = _take_over(store, record)
    log.info(EPOCH_TAKEN, epoch=committer.epoch, checkpoint=committer.latest.checkpoint)
    prompts = load_prompt_set(store, record.train_prompts)
    refuse_few_prompts(len(prompts), record.config)
    if committer.latest.checkpoint is None:
        return _begin(store, record, committer, run, live, loaded, prompts, ranks)
    return _resume(store, record, committer, prompts, ranks)


def _take_over(store: ObjectStore, record: RunRecord) -> Committer:
    try:
        return Committer.take_over(store)
    except RunEnded:  # the trainer before us finished between our look and our claim
        _refuse_ended(store, record)
        raise


def _begin(
    store: ObjectStore,
    record: RunRecord,
    committer: Committer,
    run: RunFile,
    live: LiveConfig,
    loaded: Loaded | None,
    prompts: PromptSet,
    ranks: Ranks | None,
) -> Ready:
    begun = (loaded or _load(run, live)).model
    if begun.revision != record.model_revision:
        raise UserError(
            f"{_source(run)} gave revision {begun.revision}, this run began with {record.model_revision}: "
            "restore it, or delete the run with `tba storage delete`"
        )
    learner, parts = _learner(store, begun.model, record, begun.assets, ranks)
    return Ready(
        store=store,
        record=record,
        committer=committer,
        book=Bookkeeping.begun(committer.epoch),
        learner=learner,
        tokenizer=begun.tokenizer,
        assets=begun.assets,
        prompts=prompts,
        fresh=True,
        eval_request=_eval_request(store, record),
        parts=parts,
    )


def _resume(
    store: ObjectStore, record: RunRecord, committer: Committer, prompts: PromptSet, ranks: Ranks | None
) -> Ready:
    assert committer.latest.checkpoint is not None
    key, manifest, state = restore_newest(store, committer.latest.checkpoint)
    facts = LoopFacts.of(state.facts, key)
    version0 = fetch_snapshot(store, str(facts.version0))
    model, tokenizer = build_model(
        version0.assets,
        dtype=torch.float32,
        # Ranks shard it, an adapted base is cast (`_learner`): in float32 it may not fit the device.
        device=_device() if ranks is None and record.config.model.lora is None else "cpu",
        trust_remote_code=record.config.model.trust_remote_code,
    )
    load_weights(model, version0.tensors)
    book = Bookkeeping.restored(manifest, key, committer.epoch)
    learner, parts = _learner(store, model, record, version0.assets, ranks)
    reader = ShardReader(store, binding(record, prompts, model), state.facts["shard_paths"], book.lineage)
    # Else rows above the cap that the run began with would be dropped.
    learner.buffer.set_max_trajectories((facts.live or record.live).buffer.max_trajectories)
    missing = learner.restore(state, book.step, reader)
    return Ready(
        store=store,
        record=record,
        committer=committer,
        book=book,
        learner=learner,
        tokenizer=tokenizer,
        assets=dict(version0.assets),
        prompts=prompts,
        fresh=False,
        eval_request=_eval_request(store, record),
        facts=facts,
        lost=reader.lost(missing),
        parts=parts,
    )


def binding(record: RunRecord, prompts: PromptSet, model: torch.nn.Module) -> Binding:
    """What shards of this run may refer to."""
    vocabulary = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    return Binding(record.run_id, len(prompts), int(vocabulary), record.config.model.max_model_len, prompts)


def _learner(
    store: ObjectStore, model: torch.nn.Module, record: RunRecord, assets: Mapping[str, bytes], ranks: Ranks | None
) -> tuple[Learner, Parts | None]:
    config, objective = record.config, record.config.objective
    policy: ScoringPolicy
    parts: Parts | None = None
    if ranks is None:
        if config.model.lora is not None:
            cast_parameters(model, DTYPES[config.model.dtype])
        policy = make_policy(
            model.to(_device()),
            config=config.model,
            reference=objective.reference,
            temperature=objective.temperature,
        )
    else:
        order_build(ranks, config.model, objective, assets, Bucket(store.uri, record.run_id))
        names = list(weight_tensors(model))  # an adapter adds others to it
        policy = make_sharded_policy(
            model,
            config=config.model,
            reference=objective.reference,
            temperature=objective.temperature,
            ranks=ranks,
        )
        parts = upload_parts(ranks, names)
    scorer = policy.scorer
    log.info(SCORER_CHOSEN, layout=scorer.layout, dtype=config.model.dtype, refused=scorer.refused)
    return Learner(policy, config, ranks), parts


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _load(run: RunFile, live: LiveConfig) -> Loaded:
    fork = run.config.fork_from
    if fork is not None:
        with closing(open_run_store(live.storage, fork.uri)) as store:
            loaded = Loaded(*load_fork(store, fork, run.config.model))
    else:
        loaded = Loaded(
            load_model(
                run.config.model,
                base_dir=Path(run.base_dir or "."),
                token=os.environ.get("HF_TOKEN"),
                open_store=lambda uri: open_run_store(live.storage, uri),
            )
        )
    if run.config.model.lora is not None:  # before run.json fixes a mistake for good
        try_targets(loaded.model.model, run.config.model.lora)
    count = sum(p.numel() for p in loaded.model.model.parameters())
    log.info(MODEL_LOADED, uri=_source(run), revision=loaded.model.revision, num_parameters=count)
    return loaded


def _source(run: RunFile) -> str:
    """Where the run's model comes from, for people."""
    fork = run.config.fork_from
    return f"forkFrom {fork.uri} step {fork.step}" if fork else run.config.model.uri


def _create_record(
    store: ObjectStore, run: RunFile, live: LiveConfig, loaded: Loaded, reward_code: str | None
) -> RunRecord:
    config, tokenizer = run.config, loaded.model.tokenizer
    base_dir = Path(run.base_dir or ".")
    longest = config.model.max_model_len - config.task.sampling.max_tokens
    train = _put_prompts(store, live, config.task.prompts, tokenizer, base_dir, longest, token="TBA_PROMPTS_HF_TOKEN")
    evaluation = config.task.evaluation
    held_out = None
    if evaluation.prompts is not None:
        held_out = _put_prompts(
            store,
            live,
            evaluation.prompts,
            tokenizer,
            base_dir,
            longest,
            token="TBA_EVALUATION_HF_TOKEN",
            limit=evaluation.max_prompts,
        )
    record = RunRecord(
        run_id=new_nonce(),
        owner=run.owner,
        config=config,
        model_revision=loaded.model.revision,
        train_prompts=train,
        eval_prompts=held_out,
        reward_code=None if reward_code is None else put_reward_code(store, reward_code),
        forked_from=loaded.origin,
        live=live,
    )
    refuse_few_prompts(len(load_prompt_set(store, train)), config)  # before the record fixes the mistake for good
    try:
        store.put_once(RUN, record.to_json())
        return record
    except AlreadyExists:  # two trainers began at once: the first one's record stands
        other = find_run_record(store)
        assert other is not None, "run.json was just seen"
        refuse_foreign(other, run, adopt=live.storage.adopt)
        return other


def _put_prompts(
    store: ObjectStore,
    live: LiveConfig,
    prompts: Prompts,
    tokenizer: Any,
    base_dir: Path,
    longest: int,
    *,
    token: str,
    limit: int | None = None,
) -> str:
    """`token`: the variable that holds the hub's, if it is not the model's."""
    sha, data = materialize(
        prompts,
        tokenizer,
        base_dir=base_dir,
        max_prompt_tokens=longest,
        limit=limit,
        open_store=lambda uri: open_run_store(live.storage, uri),
        token=os.environ.get(token) or os.environ.get("HF_TOKEN"),
    )
    key = prompts_key(sha)
    store.put_once(key, data)
    made = load_prompt_set(store, key)
    log.info(
        PROMPTS_MATERIALISED,
        key=key,
        prompts=len(made),
        dropped_too_long=made.dropped_too_long,
        dropped_empty=made.dropped_empty,
    )
    return key


def _eval_request(store: ObjectStore, record: RunRecord) -> EvalRequest | None:
    if record.eval_prompts is None:
        return None
    evaluation = record.config.task.evaluation
    return EvalRequest(
        prompts=record.eval_prompts,
        num_prompts=len(load_prompt_set(store, record.eval_prompts)),
        block_prompts=EVAL_BLOCK_PROMPTS,
        sampling=evaluation.sampling,
        samples=evaluation.samples,
    )


def _refuse_ended(store: ObjectStore, record: RunRecord) -> None:
    try:
        latest = Latest.parse(store.get(LATEST).data)
    except NotFound:
        if next(iter(store.list_after(CHECKPOINTS)), None) is not None:
            raise UserError(
                f"{store.uri} holds checkpoints of a run, but no `{LATEST}`: restore that object, or finish the "
                "deletion with `tba storage delete`; a run never starts again from step 0 by itself"
            ) from None
        return
    if latest.state is RunState.COMPLETE:
        raise AlreadyComplete(store.uri, record.run_id, latest)
    if latest.state is RunState.FAILED:
        raise UserError(f"the run at {store.uri} has failed for good: use another storage.uri")


def refuse_few_prompts(count: int, config: RunConfig) -> None:
    """Raises: UserError if a batch takes more different prompts than there are."""
    wanted = config.objective.prompts_per_batch
    if count < wanted:
        raise UserError(
            f"objective.promptsPerBatch (P) must be <= the number of prompts, got {wanted} > {count}: "
            "lower promptsPerBatch or give more prompts"
        )
