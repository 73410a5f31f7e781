"""Structured logs: one JSON object a line (or readable text on a terminal), event names that are an API.

Every line carries what `configure` and `bind` set for the whole process: run, role, step, policy_version.
"""

import logging
import sys
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any, TextIO

import structlog

# Event names are noun_past_verb and an API (interface.md §4): add, do not rename.
RUN_STARTED = "run_started"
RUN_RESUMED = "run_resumed"
RUN_FINISHED = "run_finished"
SIGNAL_RECEIVED = "signal_received"
TRACE_ENDED = "trace_ended"
CONFIG_RELOADED = "config_reloaded"
CONFIG_REFUSED = "config_refused"
MODEL_LOADED = "model_loaded"
SCORER_CHOSEN = "scorer_chosen"
ACTIVATIONS_PLANNED = "activations_planned"
PROMPTS_MATERIALISED = "prompts_materialised"
EPOCH_TAKEN = "epoch_taken"
SHARD_UPLOADED = "shard_uploaded"
SHARD_SPOOLED = "shard_spooled"
SHARD_QUARANTINED = "shard_quarantined"
SHARDS_INGESTED = "shards_ingested"
STEP_COMPLETED = "step_completed"
DATA_AWAITED = "data_awaited"
DATA_ARRIVED = "data_arrived"
WEIGHTS_AWAITED = "weights_awaited"
STORAGE_RETRIED = "storage_retried"
STORAGE_FAILED = "storage_failed"
STORAGE_MOVED = "storage_moved"
SNAPSHOT_PUBLISHED = "snapshot_published"
SNAPSHOT_REJECTED = "snapshot_rejected"
POLICY_SWAPPED = "policy_swapped"
CHECKPOINT_WRITTEN = "checkpoint_written"
CHECKPOINT_RESTORED = "checkpoint_restored"
CHECKPOINT_REFUSED = "checkpoint_refused"
CHECKPOINT_SKIPPED = "checkpoint_skipped"
REFERENCE_CHANGED = "reference_changed"
EVALUATION_UPLOADED = "evaluation_uploaded"
EVALUATION_COMPLETED = "evaluation_completed"
EVAL_BLOCK_QUARANTINED = "eval_block_quarantined"
REWARD_FAILED = "reward_failed"
OBJECTS_SWEPT = "objects_swept"
PROCESS_STARTED = "process_started"
RANK_ENDED = "rank_ended"
UPLOAD_DELEGATED = "upload_delegated"
NODES_AWAITED = "nodes_awaited"
NODE_JOINED = "node_joined"
NODE_LEFT = "node_left"
NODE_REFUSED = "node_refused"
COLOCATED_STARTED = "colocated_started"
COLOCATED_ENDED = "colocated_ended"
HOLD_WEAKENED = "hold_weakened"
"""beta_ratio fell below 0.05 while the policy lags: beta no longer holds it near the reference."""

_bound: dict[str, Any] = {}

log: Any = structlog.get_logger()
"""The logger of every module: `log.info(STEP_COMPLETED, loss=...)`."""


def configure(*, role: str, run: str, json: bool | None = None, file: Path | None = None) -> None:
    """Set up logging of this process, once, at its start.

    `json` None: JSON lines unless the destination is a terminal. `file` None: standard error.
    """
    stream: TextIO = sys.stderr if file is None else file.open("a", encoding="utf-8", buffering=1)
    as_json = json if json is not None else not stream.isatty()
    _bound.clear()
    bind(role=role, run=run)
    before = [
        _merge_bound,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
    ]
    last: list[Any] = (
        [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]
        if as_json
        else [structlog.dev.ConsoleRenderer(colors=stream.isatty(), timestamp_key="time")]
    )
    structlog.configure(
        processors=[*before, *last],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.WriteLoggerFactory(file=stream),
        cache_logger_on_first_use=False,  # modules hold `log` before configure runs
    )
    # Libraries that use the standard logging end up in the same lines.
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=before,
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)


def bind(**values: Any) -> None:
    """Add fields to every later line of this process, in all its threads: `bind(step=3, policy_version=2)`."""
    _bound.update(values)


def _merge_bound(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    return {**_bound, **event}
