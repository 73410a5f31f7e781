"""A policy that trains an adapter: what moves, what stays, what is kept."""

import json
import threading
import time

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.learning import feed, live_config, make_learner, make_shard, run_config, tiny_llama
from support.tiny_run import TinyRun
from torch.nn.functional import linear
from transformers.models.llama.modeling_llama import LlamaMLP

from tba.cli import main
from tba.cli.model_directory import of_checkpoint, read_snapshot
from tba.contracts.config import LoRA, TrainerSettings
from tba.contracts.errors import UserError
from tba.contracts.keys import LATEST, WEIGHTS
from tba.contracts.records import Latest, Lineage
from tba.contracts.supported import refuse_unsupported
from tba.models import load_weights, weight_tensors
from tba.run_record import find_run_record
from tba.scoring import Scorer
from tba.snapshots import SnapshotFetcher, fetch_manifest, fetch_snapshot
from tba.store import open_store
from tba.trainer.learner import new_rows
from tba.trainer.loop import Terminated
from tba.trainer.replay import replay, weights_that_differ

LORA = {"rank": 2, "alpha": 8.0}
STEPS = 40


def lora_config(dtype: str = "float32", **objective):
    config = run_config(**{"learningRate": 1e-2, **objective})
    return config.model_copy(
        update={"model": config.model.model_copy(update={"dtype": dtype, "lora": LoRA.model_validate(LORA)})}
    )


def trained(steps: int, dtype: str = "float32"):
    learner = make_learner(lora_config(dtype))
    feed(learner, make_shard(0), make_shard(1))
    results = [learner.train_step(live_config(), epoch=1) for _ in range(steps)]
    return learner, results


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_log_ratio_is_zero_at_the_first_step_and_moves_then(dtype):
    _, results = trained(3, dtype)
    assert not results[0].ell.any()
    assert np.abs(results[2].ell).max() > 1e-3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_moves_the_adapter_alone_and_the_base_lies_there_once_in_the_dtype_of_computation(dtype):
    before = {n: t.clone() for n, t in weight_tensors(make_learner(lora_config(dtype)).policy.model).items()}
    learner, _ = trained(3, dtype)
    after = weight_tensors(learner.policy.model)
    moved = {n for n in after if not torch.equal(after[n], before[n])}
    assert moved == set(learner.policy.adapter.tensors())
    assert {after[n].dtype for n in after if n not in moved} == {getattr(torch, dtype)}
    assert {after[n].dtype for n in moved} == {torch.float32}
    assert learner.policy.reference_logprobs(learner.packed([0])) == make_learner(
        lora_config(dtype)
    ).policy.policy_logprobs(learner.packed([0]), grad=False)


@pytest.mark.parametrize(("dtype", "nats"), [("float32", 1e-4), ("bfloat16", 0.2)])
def test_staged_weights_score_as_the_policy_does(dtype, nats):
    learner, _ = trained(3, dtype)
    rows = learner.packed(range(8))
    served = tiny_llama().eval().to(getattr(torch, dtype))
    load_weights(served, learner.policy.stage())
    scores = Scorer(served, temperature=1.0).sequence_logprobs(rows)
    own = learner.policy.policy_logprobs(rows, grad=False)
    assert (scores - own).abs().max() < nats


def test_a_checkpoint_holds_the_adapter_and_its_moments_and_training_goes_on_bit_for_bit():
    learner, _ = trained(3)
    state = learner.state()
    names = set(learner.policy.adapter.tensors())
    assert set(state.tensors["master"]) == names and "reference" not in state.tensors
    assert {n.split("/", 1)[1] for n in state.tensors["optimizer"]} == names
    twin = make_learner(learner.config)  # the base is version 0's
    shards = {s.header.id: s for s in (make_shard(0), make_shard(1))}
    twin.restore(state, learner.step, lambda ids: [new_rows(shards[i], Lineage()) for i in ids])
    for _ in range(4):
        assert learner.train_step(live_config(), epoch=1).loss == twin.train_step(live_config(), epoch=1).loss
    theirs = twin.policy.master_state()
    assert all(torch.equal(t, theirs[n]) for n, t in learner.policy.master_state().items())


@pytest.mark.parametrize("mode", ["Always", "Selective"])
def test_recomputed_layers_give_the_same_gradients(mode):
    learner, plain = make_learner(lora_config()), make_learner(lora_config())
    live = live_config()
    again = live.model_copy(update={"trainer": TrainerSettings(activation_checkpointing=mode)})
    for made, settings in ((learner, again), (plain, live)):
        feed(made, make_shard(0))
        made.train_step(settings, epoch=1)
    grads = {n: p.grad for n, p in plain.policy.model.named_parameters() if p.requires_grad}
    for name, parameter in learner.policy.model.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(parameter.grad, grads[name], msg=name)


def test_what_goes_not_with_an_adapter_is_refused():
    with pytest.raises(UserError, match="model.lora needs Fixed, got EMA"):
        refuse_unsupported(lora_config(reference={"type": "EMA", "decay": 0.5}))
    with pytest.raises(UserError, match=r"without trainer\.compile"):
        make_learner(lora_config()).policy.configure(TrainerSettings(compile=True))


def test_an_adapter_whose_scores_are_no_numbers_is_refused_at_start():
    config = lora_config()
    lora = LoRA(rank=2, alpha=6e38)  # a float32 number still, but not once it is multiplied
    config = config.model_copy(update={"model": config.model.model_copy(update={"lora": lora})})
    with pytest.raises(RuntimeError, match="must score alike, got a difference of nan"):
        make_learner(config)


def test_the_learning_rate_is_the_adapters_own_guess():
    assert make_learner(lora_config(learningRate=None)).optimizer.peak == 5e-5


@pytest.fixture(scope="module")
def complete(tmp_path_factory):
    """A complete run of 40 steps that two trainers made: one stopped in between, the other went on."""
    run = TinyRun(
        tmp_path_factory.mktemp("lora"), min_initial=0, model={"lora": LORA}, learningRate=1e-3, totalSteps=STEPS
    )
    sync = run.live.sync.model_copy(update={"interval_steps": 5, "retain_versions": 50})
    run.live = run.live.model_copy(update={"sync": sync})
    first, ended = run.trainer(), []
    run.put_shard(0)
    thread = threading.Thread(target=lambda: ended.append(pytest.raises(Terminated, first.run)))
    thread.start()
    while first.tracker.step < 7 and thread.is_alive():
        time.sleep(0.001)
    run.stop.set()
    thread.join(60)
    assert ended, "the first trainer must be stopped before it is done"
    run.trainer().run()
    return run


def manifests(run) -> dict[int, tuple[str, object]]:
    keys = [o.key for o in run.ready.store.list_after(WEIGHTS) if o.key.endswith("manifest.json")]
    return {m.version: (key, m) for key in keys for m in [fetch_manifest(run.ready.store, key)]}


def test_version_0_is_whole_and_every_later_snapshot_is_the_adapter_alone(complete):
    found = manifests(complete)
    whole, (_, last) = found[0], found[STEPS]
    assert whole[1].encoding == "full" and whole[1].assets
    adapter = complete.ready.learner.policy.master_state()
    assert {m.encoding for v, (_, m) in found.items() if v} == {"adapter"}
    assert last.base == whole[0] and {t.name for t in last.tensors} == set(adapter)
    assert (whole[1].epoch, last.epoch) == (1, 2), "a take-over keeps the base"
    assert sum(t.nbytes for t in adapter.values()) < last.total_bytes < whole[1].total_bytes


def test_readers_get_the_merged_weights_and_one_that_follows_reads_the_adapter_alone(complete):
    store, found = complete.ready.store, manifests(complete)
    staged = complete.ready.learner.policy.stage()
    key = Latest.parse(store.get(LATEST).data).manifest
    fetcher = SnapshotFetcher(remember=lambda: False)
    early = fetcher(store, found[5][0])
    for snapshot in (fetch_snapshot(store, key), fetcher(store, key)):
        assert snapshot.tensors.keys() == staged.keys() and snapshot.manifest.version == STEPS
        assert all(torch.equal(t, staged[n]) for n, t in snapshot.tensors.items())
        assert "config.json" in snapshot.assets
    base = fetch_snapshot(store, found[0][0]).tensors
    assert not all(torch.equal(t, base[n]) for n, t in early.tensors.items())
    shared = early.tensors["model.embed_tokens.weight"].data_ptr()
    assert fetcher(store, key).tensors["model.embed_tokens.weight"].data_ptr() == shared, "the base was read once"


def test_a_replay_ends_with_the_same_adapter(complete):
    assert weights_that_differ(complete.ready.store, replay(complete.ready.store)) == []


@pytest.mark.parametrize("model", [{}, {"lora": {"rank": 3}}])
def test_a_fork_begins_with_the_merged_weights(complete, tmp_path, model):
    fork = TinyRun(tmp_path / "fork", min_initial=0, fork_from=(complete, STEPS), model=model)
    fork.trainer()
    staged, wanted = fork.ready.learner.policy.stage(), complete.ready.learner.policy.stage()
    assert all(torch.equal(t, wanted[n]) for n, t in staged.items())


def run_command(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    return int(caught.value.code or 0)


def test_an_export_is_merged_and_the_same_from_a_snapshot_and_from_its_checkpoint(complete, tmp_path):
    staged, store = complete.ready.learner.policy.stage(), complete.ready.store
    assert run_command("export", complete.uri, "-o", str(tmp_path / "a")) == 0
    assert all(torch.equal(t, staged[n]) for n, t in load_file(tmp_path / "a" / "model.safetensors").items())
    assert read_snapshot(store, STEPS).key.startswith(WEIGHTS)
    checkpoint = Latest.parse(store.get(LATEST).data).checkpoint
    found = of_checkpoint(store, checkpoint)
    assert found.assets.keys() >= {"config.json"}
    assert all(torch.equal(t, staged[n]) for n, t in found.tensors.items())


def test_an_exported_adapter_is_the_live_one_under_pefts_names(complete, tmp_path):
    assert run_command("export", complete.uri, "--adapter", "-o", str(tmp_path / "a")) == 0
    tensors = load_file(tmp_path / "a" / "adapter_model.safetensors")
    own = complete.ready.learner.policy.master_state()
    assert tensors.keys() == {f"base_model.model.{n}" for n in own}
    assert all(torch.equal(tensors[f"base_model.model.{n}"], t) for n, t in own.items())
    settings = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"]) == (2, 8.0)
    assert complete.ready.record.config.model.uri == f"file://{settings['base_model_name_or_path']}"


def test_the_adapter_of_a_fork_names_no_base_for_it_is_not_that_of_model_uri(complete, tmp_path):
    fork = TinyRun(
        tmp_path / "fork",
        min_initial=0,
        fork_from=(complete, STEPS),
        model={"lora": LORA},
        totalSteps=2,
        learningRate=1e-3,
    )
    trainer = fork.trainer()
    fork.put_shard(0)
    trainer.run()
    assert run_command("export", fork.uri, "--adapter", "-o", str(tmp_path / "a")) == 0
    settings = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] is None and settings["revision"] is None


def test_an_adapter_that_is_not_there_is_told(complete, tmp_path, capsys):
    assert run_command("export", complete.uri, "--adapter", "--step", "0", "-o", str(tmp_path / "a")) == 64
    assert "version 0 is the base itself: choose a later --step" in capsys.readouterr().err


def test_a_target_that_is_never_called_is_told_before_the_run_is_recorded(tmp_path, monkeypatch):
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: linear(x, self.gate_proj.weight)[..., : x.shape[-1]])
    run = TinyRun(tmp_path, model={"lora": LORA | {"targetModules": ["q_proj", "gate_proj"]}})
    with pytest.raises(UserError, match="mlp.gate_proj and never calls it"):
        run.trainer()
    assert find_run_record(open_store(run.uri)) is None


def test_a_target_that_is_not_called_by_the_kernels_of_this_device_is_told(monkeypatch):
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: linear(x, self.gate_proj.weight)[..., : x.shape[-1]])
    config = lora_config()
    lora = LoRA.model_validate(LORA | {"targetModules": ["gate_proj"]})
    with pytest.raises(UserError, match="mlp.gate_proj and never calls it"):
        make_learner(config.model_copy(update={"model": config.model.model_copy(update={"lora": lora})}))


def test_targets_that_are_not_there_are_told_before_the_run_is_recorded(tmp_path):
    run = TinyRun(tmp_path, model={"lora": {"targetModules": ["qqq_proj"]}})
    with pytest.raises(UserError, match=r"no module is named \['qqq_proj'\]: choose among .*'q_proj'"):
        run.trainer()
    assert find_run_record(open_store(run.uri)) is None
