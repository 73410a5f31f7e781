"""Records that cross a process border through the bucket (system.md §3, §4).

Numbers: `commit` rises at every CAS of `latest`; `epoch` at every take-over; `version` = optimizer step of weights.
After a rollback a version may repeat, so a policy is named by `PolicyId(epoch, version)`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, NamedTuple

from pydantic import Field

from tba.contracts.base import Contract
from tba.contracts.config import LiveConfig, RunConfig
from tba.contracts.keys import LATEST
from tba.contracts.parse import parse_object

SCHEMA_VERSION = 1


class PolicyId(NamedTuple):
    """Names one set of weights."""

    epoch: int
    version: int


class Span(NamedTuple):
    """`num_tokens` consecutive response tokens sampled by policy (`epoch`, `version`)."""

    num_tokens: int
    epoch: int
    version: int


class FinishReason(StrEnum):
    """Why a response ended: `stop` = end-of-sequence token or stop string, `length` = token limit."""

    STOP = "stop"
    LENGTH = "length"


class Outcome(StrEnum):
    """What became of a response's scoring. Only `scored` rows carry a reward; a failure is never a reward of 0."""

    SCORED = "scored"
    FAILED = "failed"
    TIMED_OUT = "timed_out"


class ShardId(NamedTuple):
    """Identity of a shard: 128 random bits per searcher process and its upload counter."""

    incarnation: str
    seq: int


class TrajectoryId(NamedTuple):
    """Identity of a trajectory: its shard and its row there."""

    incarnation: str
    seq: int
    row: int


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One response with what is needed to learn from it. Produced by a searcher, consumed by the trainer.

    Token ids are trained on verbatim and never re-tokenised. `response_tokens` includes EOS when the model emitted it.
    Provenance fields are claims, not proof.
    """

    prompt_id: int  # row in the materialised prompt set
    visit: int  # counter of visits within the incarnation; a visit = one searcher's S responses to one prompt
    visit_size: int  # S: rows of this visit over all its shards
    prompt_tokens: Sequence[int]
    response_tokens: Sequence[int]
    outcome: Outcome
    reward: float | None  # None unless outcome is SCORED
    finish_reason: FinishReason
    spans: Sequence[Span]  # cover response_tokens in order
    temperature: float  # of sampling; never enters a log-probability of the objective
    created_at: float  # seconds since the Unix epoch by the searcher's clock; audit only
    sampler_logprobs: Sequence[float] | None = None  # natural log per response token, optional
    ref_logprob: float | None = None  # summed over response tokens, optional
    ref_policy: PolicyId | None = None  # whose log-probability ref_logprob is

    @property
    def policy(self) -> PolicyId:
        """The oldest span's policy: the staleness of the whole response is its."""
        return min((PolicyId(s.epoch, s.version) for s in self.spans), key=lambda p: (p.version, p.epoch))


class ShardHeader(Contract):
    """Metadata of a shard, stored in its Arrow schema."""

    run: str
    """Run id of the bucket prefix (`RunRecord.run_id`); a shard of another run is quarantined."""
    searcher: str
    incarnation: str
    seq: int = Field(ge=0)
    reward_version: str
    stats: dict[str, float] = Field(default_factory=dict)
    """Counters of the searcher process, cumulative since its start (`SearcherStats` names)."""
    schema_version: Literal[1] = 1

    @property
    def id(self) -> ShardId:
        """Identity of the shard."""
        return ShardId(self.incarnation, self.seq)


class FileEntry(Contract):
    """One data object below a manifest."""

    name: str
    """Key relative to the manifest's folder."""
    size: int = Field(ge=0)
    """Bytes."""
    hash: str
    """xxh3_128 of the bytes, 32 hex digits."""


class TensorEntry(Contract):
    """One tensor of a snapshot and the hash of its resulting bytes."""

    name: str
    dtype: str
    """safetensors name: BF16, F32, ..."""
    shape: list[int]
    file: str
    """`FileEntry.name` that holds it, or its difference from the base."""
    hash: str
    """xxh3_128 of the tensor's bytes after decoding, 32 hex digits."""


class EvalRequest(Contract):
    """Asks searchers to evaluate a snapshot in blocks."""

    prompts: str
    """Key of the prompt set."""
    num_prompts: int = Field(ge=1)
    block_prompts: int = Field(ge=1)
    """Prompts a block: block b holds prompts [b*block_prompts, (b+1)*block_prompts)."""
    sampling: Literal["greedy", "sample"]
    samples: int = Field(ge=1)
    """Responses a prompt."""

    @property
    def num_blocks(self) -> int:
        """Blocks that make the evaluation complete."""
        return -(-self.num_prompts // self.block_prompts)


class SnapshotManifest(Contract):
    """Written after every data object of a snapshot; reachable only through `latest`."""

    epoch: int = Field(ge=1)
    version: int = Field(ge=0)
    nonce: str
    encoding: Literal["full", "delta", "adapter"] = "full"
    base: str | None = None
    """Manifest key of the snapshot that a delta or an adapter applies to: its epoch, version and nonce."""
    base_hash: str | None = None
    """Digest of the names, types, shapes and hashes of the base's tensors."""
    depth: int = Field(default=0, ge=0)
    """Deltas from the anchor to this snapshot, itself included; 0 = full, an anchor. 1 of an adapter."""
    scale: float | None = None
    """Of an adapter, whose tensors are A and B of each module alone: the weights are the base's W + scale·B·A."""
    parent: str | None = None
    """Manifest key of the snapshot published before this one."""
    files: list[FileEntry]
    tensors: list[TensorEntry]
    assets: list[FileEntry] = Field(default_factory=list)
    """Model configuration and tokenizer files; in version 0 and in every anchor."""
    evaluation: EvalRequest | None = None

    @property
    def policy(self) -> PolicyId:
        """Whose weights these are."""
        return PolicyId(self.epoch, self.version)

    @property
    def total_bytes(self) -> int:
        """Bytes of all weight files."""
        return sum(f.size for f in self.files)


class RunState(StrEnum):
    """`latest.state`. Complete and Failed are terminal and never flip back."""

    RUNNING = "Running"
    COMPLETE = "Complete"
    FAILED = "Failed"


class Latest(Contract):
    """The only mutable object, changed by compare-and-swap alone."""

    commit: int = Field(ge=1)
    epoch: int = Field(ge=1)
    version: int = Field(ge=0)
    step: int = Field(ge=0)
    manifest: str | None = None
    """Key of the newest snapshot's manifest; searchers load it whenever it is not the one they hold."""
    checkpoint: str | None = None
    """Key of the newest checkpoint's manifest."""
    evaluation: str | None = None
    """Key of a snapshot manifest whose evaluation is wanted and not complete."""
    state: RunState = RunState.RUNNING
    nonce: str
    """Fresh for each body: ETags derive from content, so equal bodies would hide a change in between."""

    @classmethod
    def parse(cls, data: bytes) -> "Latest":
        """Raises: CorruptObject."""
        return parse_object(cls, LATEST, data)


class IngestState(Contract):
    """Which shards the trainer has ingested: inside the same checkpoint as optimizer and sampler."""

    intervals: dict[str, list[tuple[int, int]]] = Field(default_factory=dict)
    """Per incarnation: sorted, disjoint, non-adjacent half-open intervals [start, end) of `seq`."""
    lowest_unswept_window: int = 0
    """Windows below this one have been listed completely since they closed."""


class Lineage(Contract):
    """Where each epoch began: epoch -> optimizer step it resumed at (epoch 1 at step 0)."""

    resume_steps: dict[int, int] = Field(default_factory=dict)


class CheckpointManifest(Contract):
    """Written after every data object of a checkpoint; reachable through `latest.checkpoint` and `parent` alone."""

    epoch: int = Field(ge=1)
    step: int = Field(ge=0)
    nonce: str
    parent: str | None
    files: list[FileEntry]
    ingest: IngestState
    lineage: Lineage
    ingest_log_seq: int = Field(ge=0)
    """Objects of this epoch's ingest log that are durable and belong to this checkpoint."""
    metrics_log_seq: int = Field(ge=0)
    """Likewise for the metrics log."""
    wall_seconds: float = Field(ge=0)
    """Training time up to this step, over all attempts."""
    eval_score: float | None = None
    """Newest complete evaluation."""
    eval_scores: dict[int, float] = Field(default_factory=dict)
    """Step -> score of the newest complete evaluations. An evaluation ends after the checkpoint of its step has been
    written, so that `keepBest` finds a checkpoint's score in those behind it."""


class ForkOrigin(Contract):
    """The checkpoint of another run that version 0 was made from."""

    run_id: str
    owner: str
    checkpoint: str
    """Key of its manifest, below `config.forkFrom.uri`."""


class RunRecord(Contract):
    """`run.json`: what may never change during a run."""

    schema_version: Literal[1] = 1
    run_id: str
    """32 hex digits, made once; shards carry it."""
    owner: str
    """namespace/name of the job that made this run."""
    config: RunConfig
    model_revision: str
    """Resolved revision of the model that version 0 was made from; of a fork the checkpoint's."""
    train_prompts: str
    """Key of the materialised training prompts."""
    eval_prompts: str | None = None
    reward_code: str | None = None
    """Key of the code of a reward that came from a ConfigMap: searchers have the bucket only."""
    forked_from: ForkOrigin | None = None
    live: LiveConfig
    """Live settings at creation, never compared: what a searcher that is told nothing else takes, and what a replay
    begins with. The ingest log has later ones."""


class IngestEntry(Contract):
    """One line of the ingest log: a shard, a sync mark or other live settings, before optimizer step `before_step`."""

    before_step: int = Field(ge=1)
    key: str
    """Key of the shard; empty for what is none."""
    synced: bool = False
    """AtSync only: here the rows ingested since the last mark became the most-on-policy pool."""
    extended: bool = False
    """Of a sync mark: they joined the pool in place of replacing it, for the trainer waited."""
    num_rows: int = Field(ge=0)
    """Rows ingested before de-duplication; 0 for a quarantined shard."""
    quarantined: str | None = None
    """Why the shard was refused, if it was."""
    live: LiveConfig | None = None
    """Settings that the trainer follows from here on, if they changed here."""
