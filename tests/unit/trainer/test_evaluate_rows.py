"""Evaluations: the numbers by hand, and blocks gathered from the bucket until they are complete."""

import math
import threading
from contextlib import contextmanager

import pytest
from support.memory_store import MemoryStore

from tba.contracts.errors import StoreUnavailable
from tba.contracts.history import EvalRow
from tba.contracts.keys import EvalKey, WeightsKey
from tba.contracts.records import EvalRequest, Outcome
from tba.evaluation import EvalBlock, EvalResponse, encode_block
from tba.store import AccessDenied
from tba.trainer.evaluate import Evaluator, Pending, aggregate

HANG = 10.0  # seconds after which a test that waits for the thread has failed


def pending(version: int = 12, *, num_prompts: int = 3, samples: int = 2) -> Pending:
    request = EvalRequest(
        prompts="prompts/x", num_prompts=num_prompts, block_prompts=2, sampling="sample", samples=samples
    )
    return Pending(WeightsKey(version, 3, f"{version:032x}").path, request, since=0.0)


def answers(prompt_id: int, *rewards: float | None, num_tokens: int = 2) -> list[EvalResponse]:
    """One answer a reward; None is a failure."""
    return [
        EvalResponse(
            prompt_id,
            sample,
            Outcome.SCORED if reward is not None else Outcome.TIMED_OUT,
            reward,
            num_tokens,
            (7,) * num_tokens,
        )
        for sample, reward in enumerate(rewards)
    ]


def block(*rows: list[EvalResponse]) -> EvalBlock:
    return EvalBlock(tuple(r for group in rows for r in group))


def key(wanted: Pending, number: int) -> str:
    weights = wanted.weights
    return EvalKey(weights.version, weights.epoch, weights.nonce, number).path


def test_aggregate_by_hand():
    blocks = [
        block(answers(0, 1.0, 0.0, num_tokens=3), answers(1, 1.0, None, num_tokens=1)),
        block(answers(2, 0.0, 0.0, num_tokens=4), answers(3, None, None, num_tokens=6)),
    ]
    row = aggregate(blocks, pending(num_prompts=4), epoch=5, now=77.0)
    # Prompt means 1/2, 1, 0; prompt 3 has no score at all. Sample variance of (.5, 1, 0) is 1/4.
    assert row == EvalRow(
        epoch=5,
        step=12,
        time=77.0,
        policy_epoch=3,
        num_prompts=3,
        samples=2,
        sampling="sample",
        pass_at_1=0.5,
        pass_at_k=2 / 3,
        standard_error=math.sqrt(0.25 / 3),
        failed=3,
        mean_response_tokens=(6 + 2 + 8 + 12) / 8,
    )


@pytest.mark.parametrize("blocks", [[], [block()], [block(answers(0, None, None))]])
def test_evaluation_without_a_score_is_zero_and_not_an_error(blocks):
    row = aggregate(blocks, pending(), epoch=1, now=0.0)
    assert (row.num_prompts, row.pass_at_1, row.pass_at_k, row.standard_error) == (0, 0.0, 0.0, 0.0)
    assert row.failed == sum(len(b.rows) for b in blocks)


def test_one_prompt_has_no_standard_error():
    assert aggregate([block(answers(0, 1.0))], pending(), epoch=1, now=0.0).standard_error == 0.0


def test_failures_do_not_pull_the_mean_down():
    whole = aggregate([block(answers(0, 1.0, 1.0), answers(1, 0.0, 0.0))], pending(), epoch=1, now=0.0)
    holes = aggregate([block(answers(0, 1.0, None), answers(1, None, 0.0))], pending(), epoch=1, now=0.0)
    assert holes.pass_at_1 == whole.pass_at_1 == 0.5
    assert (whole.failed, holes.failed) == (0, 2)


class Told:
    """Collects what the evaluator tells; `wait` until a row has come."""

    def __init__(self) -> None:
        self.rows: list[tuple[Pending, EvalRow]] = []
        self.stalled: list[tuple[Pending, int]] = []
        self.came = threading.Event()

    def __call__(self, wanted: Pending, row: EvalRow) -> None:
        self.rows.append((wanted, row))
        self.came.set()

    def wait(self) -> EvalRow:
        assert self.came.wait(HANG), "no evaluation was completed"
        return self.rows[-1][1]


@contextmanager
def evaluating(store, told, *, stall_seconds: float = 600.0):
    polled = threading.Semaphore(0)

    def poll_seconds() -> float:
        polled.release()
        return 0.0005

    evaluator = Evaluator(
        store,
        epoch=5,
        poll_seconds=poll_seconds,
        stall_seconds=lambda: stall_seconds,
        give_up_seconds=600.0,
        on_complete=told,
        on_stalled=lambda wanted, blocks: told.stalled.append((wanted, blocks)),
    )
    evaluator.polled = polled
    evaluator.start()
    try:
        yield evaluator
    finally:
        evaluator.close()


def polls(evaluator, count: int = 3) -> None:
    """Return once `count` more polls have begun: all but the last of them have ended."""
    while evaluator.polled.acquire(blocking=False):
        pass
    for _ in range(count):
        assert evaluator.polled.acquire(timeout=HANG), "the thread does not poll"


def test_row_comes_when_the_last_block_has_arrived_and_not_before():
    store, told, wanted = MemoryStore(), Told(), pending()
    store.put_once(key(wanted, 0), encode_block(block(answers(0, 1.0, 1.0), answers(1, 0.0, 1.0))))
    with evaluating(store, told) as evaluator:
        evaluator.expect(wanted)
        polls(evaluator)
        assert (evaluator.blocks_done, told.rows, evaluator.pending) == (1, [], wanted)
        store.put_once(key(wanted, 1), encode_block(block(answers(2, 0.0, 0.0))))
        row = told.wait()
        polls(evaluator)
        assert evaluator.pending is None
    assert (row.step, row.epoch, row.num_prompts, row.pass_at_1) == (12, 5, 3, 0.5)
    assert len(told.rows) == 1
    assert store.count("get") == 2, "a block is read once"


def test_corrupt_block_counts_as_answered_without_rows():
    store, told, wanted = MemoryStore(), Told(), pending()
    store.put_once(key(wanted, 0), encode_block(block(answers(0, 1.0, 1.0)))[:-9])
    store.put_once(key(wanted, 1), encode_block(block(answers(2, 0.0, 1.0))))
    with evaluating(store, told) as evaluator:
        evaluator.expect(wanted)
        row = told.wait()
        evaluator.check()
    assert (row.num_prompts, row.pass_at_1, row.failed) == (1, 0.5, 0)


def test_foreign_objects_and_blocks_beyond_the_last_are_ignored():
    store, told, wanted = MemoryStore(), Told(), pending()
    prefix = EvalKey.parse(key(wanted, 0)).prefix
    store.put_once(f"{prefix}notes.txt", b"hello")
    store.put_once(key(wanted, 2), encode_block(block(answers(0, 1.0))))
    store.put_once(key(wanted, 0), encode_block(block(answers(1, 0.0))))
    with evaluating(store, told) as evaluator:
        evaluator.expect(wanted)
        polls(evaluator)
        evaluator.check()
        assert told.rows == []
        store.put_once(key(wanted, 1), encode_block(block(answers(2, 0.0))))
        assert told.wait().num_prompts == 2


def test_evaluation_stays_pending_until_its_row_has_been_told():
    """Who sees none pending closes the history: a row told later would be lost."""
    seen = []

    class Asking(Told):
        def __call__(self, wanted, row) -> None:
            seen.append(evaluator.pending)
            super().__call__(wanted, row)

    store, told, wanted = MemoryStore(), Asking(), pending(num_prompts=1)
    store.put_once(key(wanted, 0), encode_block(block(answers(0, 1.0))))
    with evaluating(store, told) as evaluator:
        evaluator.expect(wanted)
        told.wait()
    assert seen == [wanted]


def test_blocks_of_an_evaluation_that_was_replaced_never_enter_the_next_one():
    old, new = pending(4, num_prompts=1), pending(8, num_prompts=1)

    class Replacing(MemoryStore):
        """While a block of the old evaluation is being read, the new one is asked for."""

        def get(self, name):
            if EvalKey.parse(name).version == 4:
                evaluator.expect(new)
            return super().get(name)

    store, told = Replacing(), Told()
    store.put_once(key(old, 0), encode_block(block(answers(0, 0.0))))
    with evaluating(store, told) as evaluator:
        evaluator.expect(old)
        polls(evaluator)
        assert (told.rows, evaluator.pending, evaluator.blocks_done) == ([], new, 0)
        store.put_once(key(new, 0), encode_block(block(answers(0, 1.0))))
        row = told.wait()
    assert (row.step, row.pass_at_1, len(told.rows)) == (8, 1.0, 1)


def test_evaluation_without_a_new_block_for_the_stall_time_is_given_up_and_the_next_one_goes_its_way():
    store, told, dead = MemoryStore(), Told(), pending(4)
    store.put_once(key(dead, 0), encode_block(block(answers(0, 1.0))))
    with evaluating(store, told, stall_seconds=0.0) as evaluator:
        evaluator.expect(dead)
        polls(evaluator, 4)
        assert (told.stalled, told.rows, evaluator.pending) == ([(dead, 1)], [], None)
        wanted = pending(8, num_prompts=1)
        store.put_once(key(wanted, 0), encode_block(block(answers(0, 1.0))))
        evaluator.expect(wanted)
        assert told.wait().step == 8
    assert told.stalled == [(dead, 1)]


def test_a_storage_outage_is_no_stall_for_the_blocks_may_have_come():
    class Down(MemoryStore):
        def list_after(self, prefix, after=None):
            raise StoreUnavailable("no answer")

    told, wanted = Told(), pending()
    with evaluating(Down(), told, stall_seconds=0.0) as evaluator:
        evaluator.expect(wanted)
        polls(evaluator)
        assert (told.stalled, evaluator.pending) == ([], wanted)


@pytest.mark.parametrize("outage", [StoreUnavailable("no answer"), AccessDenied("credentials rotate")])
def test_outage_passes_and_a_bug_reaches_the_loop(outage):
    class Down(MemoryStore):
        error: Exception | None = outage

        def list_after(self, prefix, after=None):
            if self.error is not None:
                raise self.error
            return super().list_after(prefix, after)

    store, told, wanted = Down(), Told(), pending(num_prompts=1)
    store.put_once(key(wanted, 0), encode_block(block(answers(0, 1.0))))
    with evaluating(store, told) as evaluator:
        evaluator.expect(wanted)
        polls(evaluator)
        evaluator.check()
        store.error = None
        told.wait()
        store.error = ZeroDivisionError("a bug")
        evaluator.expect(pending(20))
        evaluator._thread.join(HANG)
        with pytest.raises(ZeroDivisionError):
            evaluator.check()
