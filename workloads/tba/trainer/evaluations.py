"""Which versions are evaluated during a run, and what becomes of the answers: history, scores, `latest`.

One at a time: an evaluation that searchers are at work on is given up only for the last one, or when no block comes.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Collection

from tba.contracts.config import LiveConfig
from tba.contracts.errors import Fenced
from tba.contracts.history import EvalRow
from tba.contracts.keys import EVAL, EvalKey, WeightsKey
from tba.contracts.records import EvalRequest, PolicyId
from tba.log import EVALUATION_COMPLETED, STORAGE_FAILED, log
from tba.protocol.latest import evaluation_done
from tba.snapshots import fetch_manifest
from tba.store import ObjectStore
from tba.trainer.committer import Committer
from tba.trainer.evaluate import Evaluator, Pending
from tba.trainer.journal import Journal
from tba.trainer.outage import PASSING

_RECOVERED = 4
"""Steps looked at for an evaluation whose score was lost: what ended earlier is in the checkpoint."""


class Evaluations:
    """Evaluations of one trainer. Thread-safe: the loop asks, the publish thread announces, a thread gathers."""

    def __init__(
        self,
        store: ObjectStore,
        committer: Committer,
        history: Journal,
        *,
        request: EvalRequest | None,
        every_steps: int,
        total_steps: int,
        live: Callable[[], LiveConfig],
        event: Callable[[str, str], None],
        on_score: Callable[[EvalRow], None] = lambda _: None,
    ) -> None:
        """`request`: what is asked of searchers; None: this run has no evaluation."""
        self._store = store
        self._committer = committer
        self._history = history
        self._request = request
        self._every_steps = every_steps
        self._total_steps = total_steps
        self._event = event
        self._on_score = on_score
        self._scores: deque[tuple[int, float]] = deque()
        self.gathering = Evaluator(
            store,
            epoch=committer.epoch,
            poll_seconds=lambda: live().sync.poll_interval_seconds,
            stall_seconds=lambda: live().sync.stall_timeout_seconds,
            give_up_seconds=live().sync.stall_timeout_seconds,
            on_complete=self._completed,
            on_stalled=self._stalled,
        )

    def request_for(self, step: int) -> EvalRequest | None:
        """What to ask of searchers with the weights of `step`; None: nothing."""
        if step == self._total_steps:
            return self._request
        due = step % self._every_steps == 0 and self.gathering.pending is None
        return self._request if due else None

    def resume(self, manifest_key: str) -> None:
        """Wait for an evaluation that an earlier trainer asked for. Raises: StoreUnavailable, CorruptObject."""
        request = fetch_manifest(self._store, manifest_key).evaluation
        if request is not None:
            self.announced(manifest_key, request)

    def recover(self, step: int, *, known: Collection[int], survives: Callable[[PolicyId], bool]) -> None:
        """Gather the newest evaluation up to `step` again if it is complete and its score not `known`.

        It ended after the checkpoint of its step, and the trainer before was gone before another one told of it.
        Raises: StoreUnavailable.
        """
        if self._request is None:
            return
        newest_first = range(step - step % self._every_steps, max(known, default=-1), -self._every_steps)
        for due in newest_first[:_RECOVERED]:
            blocks = Counter(_evaluated(info.key) for info in self._store.list_after(f"{EVAL}{due:010d}/"))
            found = [k for k, num in blocks.items() if k is not None and num >= self._request.num_blocks]
            whole = [key for key in found if survives(PolicyId(key.epoch, key.version))]
            if whole:
                self.announced(max(whole).path, self._request)
                return

    def announced(self, manifest_key: str, request: EvalRequest) -> None:
        """`latest` asks searchers for it from now on."""
        self.gathering.expect(Pending(manifest_key, request, time.time()))

    def take_scores(self) -> list[tuple[int, float]]:
        """(step, score) of what has been completed since the last call."""
        return [self._scores.popleft() for _ in range(len(self._scores))]

    def describe(self) -> str | None:
        """What is awaited, in words; None if nothing is."""
        pending = self.gathering.pending
        return None if pending is None else _progress(pending, self.gathering.blocks_done)

    # -- in the gathering thread

    def _completed(self, pending: Pending, row: EvalRow) -> None:
        if row.num_prompts:
            self._history.append(row)
            self._scores.append((row.step, row.pass_at_1))
            self._on_score(row)
            log.info(EVALUATION_COMPLETED, policy_version=row.step, pass_at_1=row.pass_at_1, pass_at_k=row.pass_at_k)
        else:  # nothing could be scored: that is a failure, not a score of 0
            self._event("evaluation_failed", f"version {row.step}: {row.failed} responses, none with a reward")
        self._withdraw(pending)

    def _stalled(self, pending: Pending, blocks: int) -> None:
        self._event("evaluation_abandoned", f"no block came any more: {_progress(pending, blocks)}")
        self._withdraw(pending)

    def _withdraw(self, pending: Pending) -> None:
        try:
            self._committer.commit(lambda current, nonce: evaluation_done(current, pending.manifest_key, nonce))
        except (*PASSING, Fenced) as error:
            # Harmless: searchers find every block done. The loop meets the same error where it matters.
            log.warning(STORAGE_FAILED, task="evaluate", error=str(error))


def _evaluated(path: str) -> WeightsKey | None:
    """The snapshot that a block is of; None for a foreign object."""
    try:
        key = EvalKey.parse(path)
    except ValueError:
        return None
    return WeightsKey(key.version, key.epoch, key.nonce)


def _progress(pending: Pending, blocks: int) -> str:
    total, version = pending.request.num_blocks, pending.weights.version
    return f"{blocks} of {total} blocks of version {version} evaluated by searchers"
