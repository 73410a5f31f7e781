"""Which versions are evaluated, one at a time, and what becomes of an evaluation that ends well, badly or never."""

import pytest
from support.bucket import Bucket
from support.learning import live_config

from tba.contracts.errors import StoreUnavailable
from tba.contracts.history import EvalRow
from tba.contracts.keys import EvalKey, WeightsKey
from tba.contracts.records import EvalRequest, Outcome
from tba.evaluation import EvalBlock, EvalResponse, encode_block
from tba.store import AccessDenied
from tba.trainer.evaluations import Evaluations
from tba.trainer.journal import Journal

REQUEST = EvalRequest(prompts="p", num_prompts=4, block_prompts=2, sampling="greedy", samples=1)


class Rig:
    def __init__(self, request=REQUEST) -> None:
        self.bucket = Bucket()
        self.key = self.bucket.snapshot(10, evaluation=True)
        self.events: list[tuple[str, str]] = []
        self.evaluations = Evaluations(
            self.bucket.store,
            self.bucket.committer,
            Journal(self.bucket.store, "metrics", 1),
            request=request,
            every_steps=10,
            total_steps=25,
            live=live_config,
            event=lambda event, detail: self.events.append((event, detail)),
        )

    def end(self, *, num_prompts: int) -> None:
        """The gathering thread has all blocks."""
        row = EvalRow(
            epoch=1, step=10, time=0.0, policy_epoch=1, num_prompts=num_prompts, samples=1, sampling="greedy",
            pass_at_1=0.5, pass_at_k=0.5, standard_error=0.0, failed=2, mean_response_tokens=3.0,
        )  # fmt: skip
        pending = self.evaluations.gathering.pending
        assert pending is not None
        self.evaluations._completed(pending, row)
        self.evaluations.gathering._forget(pending)


def test_every_tenth_version_and_the_last_are_evaluated_one_at_a_time():
    rig = Rig()
    asked = [step for step in range(26) if rig.evaluations.request_for(step) is REQUEST]
    assert asked == [0, 10, 20, 25]
    rig.evaluations.announced(rig.key, REQUEST)
    assert [step for step in range(26) if rig.evaluations.request_for(step)] == [25], "only the last replaces another"
    assert rig.evaluations.describe() == "0 of 2 blocks of version 10 evaluated by searchers"
    rig.end(num_prompts=4)
    assert rig.evaluations.request_for(20) is REQUEST and rig.evaluations.describe() is None
    assert Rig(request=None).evaluations.request_for(25) is None


def test_a_score_is_told_with_its_step_and_the_request_is_withdrawn():
    rig = Rig()
    rig.evaluations.announced(rig.key, REQUEST)
    rig.end(num_prompts=4)
    assert (rig.evaluations.take_scores(), rig.evaluations.take_scores()) == ([(10, 0.5)], [])
    assert rig.bucket.latest.evaluation is None and rig.events == []


def test_an_evaluation_without_any_reward_is_no_score_of_zero():
    rig = Rig()
    rig.evaluations.announced(rig.key, REQUEST)
    rig.end(num_prompts=0)
    assert rig.evaluations.take_scores() == [] and rig.bucket.latest.evaluation is None
    assert rig.events == [("evaluation_failed", "version 10: 2 responses, none with a reward")]


def test_an_evaluation_that_stalls_is_told_withdrawn_and_makes_room_for_the_next():
    rig = Rig()
    rig.evaluations.announced(rig.key, REQUEST)
    gathering = rig.evaluations.gathering
    assert gathering.pending is not None
    gathering._last_progress -= 1e6
    gathering._poll(gathering.pending, {})
    ((event, detail),) = rig.events
    assert event == "evaluation_abandoned" and "0 of 2 blocks of version 10" in detail
    assert rig.bucket.latest.evaluation is None
    assert rig.evaluations.request_for(20) is REQUEST


def test_an_evaluation_of_the_trainer_before_is_waited_for_if_its_snapshot_asked_for_one():
    rig = Rig()
    rig.evaluations.resume(rig.key)
    assert rig.evaluations.gathering.pending is None, "that snapshot carries no request"


def put_blocks(rig: Rig, key: str, *numbers: int) -> None:
    weights = WeightsKey.parse(key)
    for block in numbers:
        rows = tuple(EvalResponse(2 * block + i, 0, Outcome.SCORED, float(i), 1, (7,)) for i in range(2))
        path = EvalKey(weights.version, weights.epoch, weights.nonce, block).path
        rig.bucket.store.put_once(path, encode_block(EvalBlock(rows)))


def test_an_evaluation_that_ended_after_the_last_checkpoint_is_gathered_again():
    rig = Rig()
    put_blocks(rig, rig.key, 0)
    rig.evaluations.recover(19, known={0: 0.1}, survives=lambda _: True)
    assert rig.evaluations.gathering.pending is None, "half of it: nobody is asked for the rest any more"
    put_blocks(rig, rig.key, 1)
    rig.bucket.store.put_once("eval/0000000010/foreign", b"")
    rig.evaluations.recover(19, known={0: 0.1, 10: 0.2}, survives=lambda _: True)
    rig.evaluations.recover(19, known={}, survives=lambda policy: policy.version < 10)
    rig.evaluations.recover(9, known={}, survives=lambda _: True)
    assert rig.evaluations.gathering.pending is None, "known, rolled back, or of a later step"
    rig.evaluations.recover(25, known={0: 0.1}, survives=lambda _: True)
    pending = rig.evaluations.gathering.pending
    assert pending is not None and pending.manifest_key == rig.key
    rig.evaluations.gathering._poll(pending, {})
    assert rig.evaluations.take_scores() == [(10, 0.5)]


@pytest.mark.parametrize("error", [StoreUnavailable("no answer"), AccessDenied("credentials rotate")])
def test_a_request_that_cannot_be_withdrawn_just_now_loses_no_score(error):
    rig = Rig()

    def refuse() -> None:
        raise error

    rig.bucket.store.before_cas = refuse
    rig.evaluations.announced(rig.key, REQUEST)
    rig.end(num_prompts=4)
    assert rig.evaluations.take_scores() == [(10, 0.5)]
    assert WeightsKey.parse(rig.bucket.latest.evaluation or "").version == 10
