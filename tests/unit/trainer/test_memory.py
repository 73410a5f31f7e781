"""Recomputing layers: same gradients, decided by what fits."""

import pytest
import torch
from support.learning import tiny_llama
from support.scoring import gradients, grouped_rows, tiny

from tba.contracts.config import TrainerSettings
from tba.contracts.errors import UserError
from tba.scoring import Scorer
from tba.trainer.memory import ActivationMemory, layers_of, needs_checkpointing, set_checkpointing, spare_bytes


def test_recomputed_layers_run_twice_and_give_the_same_gradients():
    model = tiny()
    scorer = Scorer(model, temperature=1.0)
    rows = scorer.pack(*grouped_rows())
    runs: list[int] = []
    layers_of(model)[0].input_layernorm.register_forward_hook(lambda *_: runs.append(1))
    found = []
    for wanted, times in ((False, 1), (True, 2), (False, 1)):
        set_checkpointing(model, wanted)
        runs.clear()
        scorer.sequence_logprobs(rows).sum().backward()
        assert len(runs) == times
        found.append(gradients(model))
    assert all(torch.equal(found[0][n], found[1][n]) for n in found[0])


def test_recomputation_leaves_the_modules_of_a_layer_in_evaluation_mode():
    model = tiny(attention_dropout=0.5)
    set_checkpointing(model, True)
    layers = set(layers_of(model))
    assert all(layer.training for layer in layers)
    assert not any(module.training for module in model.modules() if module not in layers)


def test_nothing_is_recomputed_without_gradients():
    model = tiny()
    scorer = Scorer(model, temperature=1.0)
    set_checkpointing(model, True)
    with torch.no_grad():
        values = scorer.sequence_logprobs(scorer.pack(*grouped_rows()))
    assert not values.requires_grad


@pytest.mark.parametrize(("mode", "expected"), [("Always", True), ("Never", False), ("Auto", False)])
def test_setting_decides_on_a_cpu_where_auto_means_never(mode, expected):
    model = tiny_llama().eval()
    memory = ActivationMemory(model, Scorer(model, temperature=1.0))
    memory.configure(TrainerSettings(activation_checkpointing=mode))
    assert all(layer.gradient_checkpointing is expected for layer in layers_of(model))


def test_activations_are_recomputed_when_a_micro_batch_would_fill_the_free_memory():
    assert not needs_checkpointing(1000.0, 1000, 2_000_000)
    assert needs_checkpointing(1000.0, 2000, 2_000_000)
    assert needs_checkpointing(1.0, 1, -5), "what is owed already leaves nothing"


def test_the_share_of_a_colocated_engine_is_not_free_before_it_has_started():
    assert spare_bytes(free=80, total=100, own=15, engine_share=0.0) == 80
    assert spare_bytes(free=80, total=100, own=15, engine_share=0.4) == 45
    assert spare_bytes(free=40, total=100, own=15, engine_share=0.4) == 40, "it is there"
    assert spare_bytes(free=30, total=100, own=70, engine_share=0.4) == -10


def test_model_without_such_layers_refuses_always():
    with pytest.raises(UserError, match="set Never"):
        set_checkpointing(torch.nn.Linear(1, 1), True)
