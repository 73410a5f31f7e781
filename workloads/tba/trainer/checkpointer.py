"""Writes checkpoints beside the training loop: logs, then state, then the commit, in a thread of their own."""

import time
from collections import deque
from collections.abc import Callable, Sequence

from tba.contracts.records import CheckpointManifest
from tba.failpoints import failpoint
from tba.log import CHECKPOINT_WRITTEN, log
from tba.protocol.latest import checkpointed
from tba.store import ObjectStore
from tba.trainer.background import Background
from tba.trainer.checkpoint import TrainerState, write_checkpoint
from tba.trainer.committer import Committer
from tba.trainer.journal import Journal


class Checkpointer:
    """At most one checkpoint at a time; a second waits for the first."""

    def __init__(
        self,
        store: ObjectStore,
        committer: Committer,
        logs: Sequence[Journal],
        *,
        give_up_seconds: float,
        event: Callable[[str, str], None],
    ) -> None:
        """`logs` are made durable before a checkpoint, which never runs ahead of them."""
        self._store = store
        self._committer = committer
        self._logs = logs
        self._event = event
        self._committed: deque[str] = deque()
        self.background = Background("checkpoint", give_up_seconds=give_up_seconds)
        self.last_seconds = 0.0
        """From capture to commit, of the last one."""

    def save(self, manifest: CheckpointManifest, state: TrainerState, *, captured: float) -> None:
        """Begin to upload and commit a detached state, captured at monotonic time `captured`.

        Raises: what the one before ended with.
        """

        def task() -> None:
            for journal in self._logs:
                journal.flush()
            key = write_checkpoint(self._store, manifest, state)
            self._committer.commit(lambda current, nonce: checkpointed(current, key, nonce))
            failpoint("checkpoint.after_commit")
            self._committed.append(key)
            self.last_seconds = time.monotonic() - captured
            log.info(CHECKPOINT_WRITTEN, step=manifest.step, seconds=round(self.last_seconds, 3))
            self._event("checkpoint", f"step {manifest.step}")

        self.background.submit(task)

    def take_committed(self) -> list[str]:
        """Manifest keys committed since the last call, in order."""
        return [self._committed.popleft() for _ in range(len(self._committed))]
