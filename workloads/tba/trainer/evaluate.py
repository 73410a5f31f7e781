"""Gathers evaluation blocks that searchers put into the bucket, and turns a complete set into one row."""

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tba.contracts.errors import CorruptObject
from tba.contracts.history import EvalRow
from tba.contracts.keys import EvalKey, WeightsKey
from tba.contracts.records import EvalRequest, Outcome
from tba.evaluation import EvalBlock, decode_block
from tba.log import EVAL_BLOCK_QUARANTINED, log
from tba.store import ObjectStore
from tba.trainer.outage import PASSING, Outage


@dataclass(frozen=True, slots=True)
class Pending:
    """An evaluation that was asked for."""

    manifest_key: str
    request: EvalRequest
    since: float  # unix seconds

    @property
    def weights(self) -> WeightsKey:
        """Snapshot under evaluation."""
        return WeightsKey.parse(self.manifest_key)


def aggregate(blocks: Sequence[EvalBlock], pending: Pending, *, epoch: int, now: float) -> EvalRow:
    """Mean reward and best-of-samples over prompts; failures are left out and counted.

    With rewards of 0 and 1, pass_at_1 is the expected accuracy of one sample and pass_at_k that of k samples.
    """
    scores: dict[int, list[float]] = {}
    failed = tokens = responses = 0
    for block in blocks:
        for row in block.rows:
            responses += 1
            tokens += row.num_tokens
            if row.outcome is Outcome.SCORED and row.reward is not None:
                scores.setdefault(row.prompt_id, []).append(row.reward)
            else:
                failed += 1
    means = [sum(s) / len(s) for s in scores.values()]
    n = len(means)
    mean = sum(means) / n if n else 0.0
    variance = sum((m - mean) ** 2 for m in means) / (n - 1) if n > 1 else 0.0
    return EvalRow(
        epoch=epoch,
        step=pending.weights.version,
        time=now,
        policy_epoch=pending.weights.epoch,
        num_prompts=n,
        samples=pending.request.samples,
        sampling=pending.request.sampling,
        pass_at_1=mean,
        pass_at_k=sum(max(s) for s in scores.values()) / n if n else 0.0,
        standard_error=math.sqrt(variance / n) if n else 0.0,
        failed=failed,
        mean_response_tokens=tokens / responses if responses else 0.0,
    )


class Evaluator:
    """Polls for blocks of the one pending evaluation in a thread of its own.

    `on_complete` gets its row, or `on_stalled` the number of blocks that had come when none came any more.
    """

    def __init__(
        self,
        store: ObjectStore,
        *,
        epoch: int,
        poll_seconds: Callable[[], float],
        stall_seconds: Callable[[], float],
        give_up_seconds: float,
        on_complete: Callable[[Pending, EvalRow], None],
        on_stalled: Callable[[Pending, int], None],
    ) -> None:
        self._store = store
        self._epoch = epoch
        self._poll_seconds = poll_seconds
        self._stall_seconds = stall_seconds
        self._on_complete = on_complete
        self._on_stalled = on_stalled
        self._lock = threading.Lock()
        self._pending: Pending | None = None
        self._blocks: dict[int, EvalBlock] = {}  # of `_pending`; a new one brings a new dict, so that none is mixed
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._last_progress = time.monotonic()  # a block arrived, or the evaluation was asked for
        self.outage = Outage("evaluate", give_up_seconds=give_up_seconds)
        self._thread = threading.Thread(target=self._run, name="evaluate", daemon=True)

    def start(self) -> None:
        """Begin polling."""
        self._thread.start()

    def close(self) -> None:
        """Stop polling and wait for the thread (bounded)."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(10.0)

    @property
    def pending(self) -> Pending | None:
        """The evaluation being waited for."""
        with self._lock:
            return self._pending

    @property
    def blocks_done(self) -> int:
        """Blocks of the pending evaluation that have arrived."""
        return len(self._blocks)

    def expect(self, pending: Pending) -> None:
        """Wait for this evaluation from now on, in place of any other."""
        with self._lock:
            self._pending, self._blocks = pending, {}
            self._last_progress = time.monotonic()

    def check(self) -> None:
        """Raise the thread's error."""
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            while not self._stop.wait(self._poll_seconds()):
                with self._lock:
                    pending, blocks = self._pending, self._blocks
                if pending is not None:
                    self._poll_guarded(pending, blocks)
        except BaseException as error:
            self._error = error

    def _poll_guarded(self, pending: Pending, blocks: dict[int, EvalBlock]) -> None:
        try:
            self._poll(pending, blocks)
            self.outage.ended()
        except PASSING as error:
            self.outage.failed(error)

    def _poll(self, pending: Pending, blocks: dict[int, EvalBlock]) -> None:
        weights = pending.weights
        prefix = EvalKey(weights.version, weights.epoch, weights.nonce, 0).prefix
        for info in self._store.list_after(prefix):
            block = _block_of(info.key)
            if block is None or block in blocks or block >= pending.request.num_blocks:
                continue
            try:
                blocks[block] = decode_block(self._store.get(info.key).data)
            except CorruptObject as error:
                # The key cannot be written again: an unreadable block counts as answered, with no rows.
                log.error(EVAL_BLOCK_QUARANTINED, key=info.key, error=str(error))
                blocks[block] = EvalBlock(rows=())
            self._last_progress = time.monotonic()
        if self.pending is not pending:
            return
        # Pending until it is told: whoever sees none pending may close the run's history.
        if len(blocks) == pending.request.num_blocks:
            self._on_complete(pending, aggregate(list(blocks.values()), pending, epoch=self._epoch, now=time.time()))
            self._forget(pending)
        elif time.monotonic() - self._last_progress > self._stall_seconds():  # all there is has just been read
            self._on_stalled(pending, len(blocks))
            self._forget(pending)

    def _forget(self, pending: Pending) -> None:
        with self._lock:
            if self._pending is pending:
                self._pending = None


def _block_of(path: str) -> int | None:
    """None for a foreign object below the prefix, which is no reason to stop training."""
    try:
        return EvalKey.parse(path).block
    except ValueError:
        return None
