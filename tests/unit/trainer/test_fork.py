"""A run that starts from another run's checkpoint: the same policy, and nothing else of it."""

from dataclasses import replace

import pytest
import torch
from support.tiny_run import TinyRun

from tba.contracts.config import ForkFrom
from tba.contracts.errors import UserError
from tba.contracts.keys import LATEST, RUN, WEIGHTS
from tba.contracts.records import Latest, RunRecord
from tba.run_record import read_run_record
from tba.trainer.checkpoint import read_checkpoint
from tba.trainer.fork import outline_fork


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A complete run of 3 steps with checkpoints of steps 0, 2 and 3."""
    run = TinyRun(tmp_path_factory.mktemp("first"), min_initial=0, learningRate=1e-2, schedule={"warmupSteps": 0})
    checkpoints = run.live.storage.checkpoints.model_copy(update={"every_steps": 2})
    run.live = run.live.model_copy(update={"storage": run.live.storage.model_copy(update={"checkpoints": checkpoints})})
    trainer = run.trainer()
    run.put_shard(0)
    trainer.run()
    return run


def masters(run: TinyRun, step: int) -> dict[str, torch.Tensor]:
    """Of a checkpoint, by following parents."""
    key = Latest.parse(run.ready.store.get(LATEST).data).checkpoint
    while key is not None:
        manifest, state = read_checkpoint(run.ready.store, key)
        if manifest.step == step:
            return dict(state.tensors["master"])
        key = manifest.parent
    raise AssertionError(f"no checkpoint of step {step}")


@pytest.mark.parametrize("step", [2, 3])
def test_version_0_of_a_fork_is_the_policy_of_that_step_and_all_else_begins_anew(trained, tmp_path, step):
    fork = TinyRun(tmp_path / "fork", min_initial=0, fork_from=(trained, step))
    trainer = fork.trainer()
    learner = fork.ready.learner
    torch.testing.assert_close(learner.policy.master_state(), masters(trained, step), rtol=0, atol=0)
    reference = dict(learner.policy.reference_model.named_parameters())
    assert all(torch.equal(p, reference[n]) for n, p in learner.policy.model.named_parameters())
    assert (learner.step, len(learner.buffer), fork.ready.book.step, fork.ready.fresh) == (0, 0, 0, True)
    fork.put_shard(0)
    trainer.run()
    assert trainer.tracker.progress().state == "Complete" and trainer.tracker.step == 3


def test_a_fork_records_where_it_comes_from_and_leaves_the_other_run_alone(trained, tmp_path):
    before = {o.key: o.etag for o in trained.ready.store.list_after("")}
    fork = TinyRun(tmp_path / "fork", fork_from=(trained, 3))
    fork.trainer()
    record = read_run_record(fork.ready.store)
    origin = record.forked_from
    assert origin is not None and origin.run_id == trained.ready.record.run_id != record.run_id
    assert origin.owner == "default/tiny" and origin.checkpoint.startswith("checkpoints/0000000003/")
    assert RunRecord.model_validate_json(fork.ready.store.get(RUN).data).config.fork_from is not None
    assert {o.key: o.etag for o in trained.ready.store.list_after("")} == before


def test_a_fork_that_is_stopped_before_its_first_checkpoint_begins_the_same_again(trained, tmp_path):
    fork = TinyRun(tmp_path / "fork", fork_from=(trained, 2))
    fork.trainer()
    first = fork.ready.learner.policy.master_state()
    fork.trainer()
    assert fork.ready.fresh and fork.ready.committer.epoch == 2
    torch.testing.assert_close(fork.ready.learner.policy.master_state(), first, rtol=0, atol=0)


def test_a_step_without_a_checkpoint_is_refused_with_the_steps_there_are(trained, tmp_path):
    with pytest.raises(UserError, match=r"forkFrom.step: the run at .* no checkpoint of step 1; there are \[0, 2, 3\]"):
        TinyRun(tmp_path / "fork", fork_from=(trained, 1)).trainer()
    assert not (tmp_path / "fork" / "store" / "run.json").exists(), "a mistake is not fixed for good"


def test_what_a_fork_begins_with_is_known_before_its_weights_are_read(trained):
    store, settings = trained.ready.store, trained.ready.record.config.model
    model, tokenizer = outline_fork(store, ForkFrom(uri=trained.uri, step=2), settings)
    assert {p.device.type for p in model.parameters()} == {"meta"} and tokenizer("1+2=")["input_ids"]
    with pytest.raises(UserError, match="no checkpoint of step 1"):
        outline_fork(store, ForkFrom(uri=trained.uri, step=1), settings)


def test_a_checkpoint_whose_weights_were_swept_is_none(trained, tmp_path):
    store = trained.ready.store
    swept = next(o.key for o in store.list_after("checkpoints/0000000002/") if o.key.endswith("master.safetensors"))
    data = store.get(swept).data
    store.delete([swept])
    try:
        with pytest.raises(UserError, match=r"there are \[0, 3\]"):
            TinyRun(tmp_path / "fork", fork_from=(trained, 2)).trainer()
    finally:
        store.put_once(swept, data)


def test_a_prefix_without_a_run_is_refused(tmp_path):
    empty = TinyRun(tmp_path / "empty")
    with pytest.raises(UserError, match="no run at"):
        TinyRun(tmp_path / "fork", fork_from=(empty, 0)).trainer()


def test_another_step_is_a_changed_job_not_a_resume(trained, tmp_path):
    fork = TinyRun(tmp_path / "fork", fork_from=(trained, 2))
    fork.trainer()
    with pytest.raises(UserError, match="forkFrom.step was 2, is now 3"):
        TinyRun(tmp_path / "fork", fork_from=(trained, 3)).trainer()


def test_the_weights_published_first_are_those_of_the_fork(trained, tmp_path):
    fork = TinyRun(tmp_path / "fork", min_initial=0, fork_from=(trained, 3))
    trainer = fork.trainer()
    trainer._publish(None)
    trainer._join(trainer._publisher.background)
    assert [o.key for o in fork.ready.store.list_after(f"{WEIGHTS}0000000000/") if o.key.endswith("manifest.json")]
    assert replace(fork.ready).assets.keys() == trained.ready.assets.keys()
