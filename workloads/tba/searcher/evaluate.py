"""A searcher's part in an evaluation: block after block from a random start, leaving out what others have done.

Storage is spoken to in a thread, so that generation goes on. A duplicate block loses quietly: put_once keeps the first.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from tba.contracts.errors import StoreUnavailable
from tba.contracts.keys import EvalKey, WeightsKey
from tba.contracts.records import EvalRequest
from tba.evaluation import EvalBlock, encode_block
from tba.log import EVALUATION_UPLOADED, STORAGE_RETRIED, log
from tba.prompts import PromptSet, load_prompt_set
from tba.searcher.work import EvalWork
from tba.store import AccessDenied, AlreadyExists, NotFound, ObjectStore

_RETRY_SECONDS = 1.0

T = TypeVar("T")
LoadPrompts = Callable[[ObjectStore, str], PromptSet]


class Evaluation:
    """`poll` gives blocks to do, `finish` hands them in. Over when `over`."""

    def __init__(
        self,
        store: ObjectStore,
        manifest_key: str,
        request: EvalRequest,
        *,
        offset: int,
        stopped: Callable[[], bool],
        load_prompts: LoadPrompts = load_prompt_set,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`offset`: any number; the block to begin with is its remainder."""
        self.key = manifest_key
        self.request = request
        self._store = store
        self._weights = WeightsKey.parse(manifest_key)
        self._stopped, self._load_prompts, self._sleep = stopped, load_prompts, sleep
        first = offset % request.num_blocks
        self._order = [*range(first, request.num_blocks), *range(first)]
        # Half of all at most: the rest is for other searchers, if there are any.
        self._most_at_once = -(-request.num_blocks // 2)
        self._at_work: list[EvalWork] = []
        self._prompts: PromptSet | None = None
        self._executor = ThreadPoolExecutor(2, thread_name_prefix="evaluate")
        self._next: Future[EvalWork | None] | None = self._executor.submit(self._find)
        self._puts: list[Future[None]] = []
        self.uploaded = 0
        """Blocks of ours that are the ones in the bucket."""

    @property
    def looking(self) -> bool:
        """Whether a block may be found any moment."""
        return self._next is not None and len(self._at_work) < self._most_at_once

    @property
    def over(self) -> bool:
        """Whether nothing is left to do here."""
        return self._next is None and not self._at_work and all(f.done() for f in self._puts)

    def poll(self) -> EvalWork | None:
        """A block to do, each once; None while none is known or enough are at work. Raises what the threads raised."""
        for put in self._puts:
            if put.done():
                put.result()
        if self._next is None or not self._next.done() or len(self._at_work) >= self._most_at_once:
            return None
        work = self._next.result()
        self._next = None if work is None else self._executor.submit(self._find)
        if work is not None:
            self._at_work.append(work)
        return work

    def stop_looking(self) -> None:
        """No more blocks: the evaluation is not wanted any more."""
        self._next = None

    def finish(self, work: EvalWork) -> None:
        """Upload a finished block. A block of another evaluation is ignored."""
        if not any(w is work for w in self._at_work):
            return
        self._at_work = [w for w in self._at_work if w is not work]
        block = work.result()
        self._puts.append(self._executor.submit(self._put, work.block, block))

    def close(self) -> None:
        """Leave what is under way behind."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _find(self) -> EvalWork | None:
        if self._prompts is None:
            self._prompts = self._patiently(lambda: self._load_prompts(self._store, self.request.prompts))
            if self._prompts is None:
                return None
        while self._order:
            block = self._order.pop(0)
            if not self._exists(block):
                size = self.request.block_prompts
                count = min(size, min(self.request.num_prompts, len(self._prompts)) - block * size)
                return EvalWork(block, block * size, count, self.request.samples, self._prompts)
        return None

    def _path(self, block: int) -> str:
        return EvalKey(self._weights.version, self._weights.epoch, self._weights.nonce, block).path

    def _exists(self, block: int) -> bool:
        def look() -> bool:
            try:
                self._store.head(self._path(block))
            except (NotFound, AccessDenied):  # denied: so S3 answers for a missing key without the right to list
                return False
            return True

        return bool(self._patiently(look))

    def _put(self, number: int, block: EvalBlock) -> None:
        data = encode_block(block)

        def put() -> bool:
            try:
                self._store.put_once(self._path(number), data)
            except AlreadyExists:
                return False
            return True

        if self._patiently(put):
            self.uploaded += 1
            log.info(EVALUATION_UPLOADED, version=self._weights.version, block=number, responses=len(block.rows))

    def _patiently(self, action: Callable[[], T]) -> T | None:
        """The action's result, tried again while storage is down; None if this process stops meanwhile."""
        while not self._stopped():
            try:
                return action()
            except (StoreUnavailable, AccessDenied) as error:  # denied: credentials may be about to rotate
                log.warning(STORAGE_RETRIED, task="evaluate", error=str(error))
                self._sleep(_RETRY_SECONDS)
        return None
