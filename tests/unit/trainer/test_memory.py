"""Recomputing layers: same gradients, decided by what fits."""

import collections

import pytest
import torch
from support.learning import tiny_llama
from support.scoring import gradients, grouped_rows, tiny
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.llama.modeling_llama import LlamaMLP

from tba.contracts.config import TrainerSettings
from tba.contracts.errors import UserError
from tba.scoring import Scorer
from tba.trainer.memory import ActivationMemory, cheapest_that_fits, spare_bytes
from tba.trainer.recomputation import is_gated_mlp, layers_of, set_recomputation


class Operators(TorchDispatchMode):
    """Counts what is computed within it."""

    def __init__(self) -> None:
        super().__init__()
        self.count: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        del types
        self.count[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def counted_gradients(model, scorer, rows):
    """Of one forward and backward pass, and the operators of both."""
    with Operators() as operators:
        scorer.sequence_logprobs(rows).sum().backward()
    return gradients(model), operators.count


def test_recomputed_layers_run_twice_and_give_the_same_gradients():
    model = tiny()
    scorer = Scorer(model, temperature=1.0)
    rows = scorer.pack(*grouped_rows())
    runs: list[int] = []
    layers_of(model)[0].mlp.act_fn.register_forward_hook(lambda *_: runs.append(1))
    found = []
    for wanted, times in (("none", 1), ("full", 2), ("selective", 2), ("none", 1)):
        set_recomputation(model, wanted)
        runs.clear()
        scorer.sequence_logprobs(rows).sum().backward()
        assert len(runs) == times
        found.append(gradients(model))
    for again in found[1:]:
        assert all(torch.equal(found[0][n], again[n]) for n in found[0])


def test_selective_recomputation_repeats_no_matrix_product_and_no_attention():
    model = tiny()
    scorer = Scorer(model, temperature=1.0)
    rows = scorer.pack(*grouped_rows())
    assert scorer.layout == "buckets"
    counts = []
    for wanted in ("none", "selective", "full"):
        set_recomputation(model, wanted)
        counts.append(counted_gradients(model, scorer, rows)[1])
    plain, selective, full = counts
    expensive = [n for n in plain if n == "mm" or n.startswith("_scaled_dot_product")]
    assert len(expensive) >= 3, "products, attention forward and backward"
    assert {n: selective[n] for n in expensive} == {n: plain[n] for n in expensive}
    assert full["mm"] > plain["mm"]
    assert selective["silu"] == full["silu"] == 2 * plain["silu"], "the cheap rest is computed again"


@pytest.mark.parametrize(
    ("family", "changes", "is_one"),
    [
        ("llama", {}, True),
        ("gemma3_text", {"head_dim": 8}, True),
        ("phi3", {"pad_token_id": 0}, False),  # its gate and up are one matrix
        ("qwen3_moe", {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}, False),
        (
            "gemma3n_text",
            {"head_dim": 8, "laurel_rank": 4, "vocab_size_per_layer_input": 40, "num_kv_shared_layers": 0},
            False,
        ),  # makes it sparse
    ],
)
def test_gated_network_is_known_by_what_it_computes(family, changes, is_one):
    assert is_gated_mlp(layers_of(tiny(family, **changes))[0].mlp) is is_one


def test_a_gated_network_that_does_more_or_has_other_parts_is_not_taken_for_one():
    class Scaled(LlamaMLP):
        def forward(self, x):
            return 2 * self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

    mlp = LlamaMLP(tiny().config)
    assert is_gated_mlp(mlp)
    assert not is_gated_mlp(Scaled(tiny().config))
    mlp.down_proj = torch.nn.Sequential(mlp.down_proj)  # as an adapter stands around it
    assert not is_gated_mlp(mlp)


def bytes_kept(scorer, rows) -> int:
    """Of a forward pass with gradients, until its backward pass."""
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        kept = scorer.token_logprobs(rows)
    del kept
    return sum(event.self_cpu_memory_usage for event in profile.key_averages())


def test_less_is_kept_the_more_is_recomputed():
    model = tiny(hidden_size=64, intermediate_size=256, num_hidden_layers=4)
    scorer = Scorer(model, temperature=1.0)
    rows = scorer.pack(*grouped_rows())
    sizes = []
    for wanted in ("none", "selective", "full"):
        set_recomputation(model, wanted)
        sizes.append(bytes_kept(scorer, rows))
    plain, selective, full = sizes
    assert full < selective < 0.75 * plain


@pytest.mark.parametrize("wanted", ["selective", "full"])
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("opt", {"dropout": 0.5, "ffn_dim": 32, "word_embed_proj_dim": 16}),  # drops out where its layer is in training
        ("qwen3_moe", {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
        ("gemma2", {"head_dim": 8}),
    ],
)
def test_recomputed_layers_of_other_families_give_the_same_gradients(family, changes, wanted):
    model = tiny(family, **changes)
    scorer = Scorer(model, temperature=1.0)
    rows = scorer.pack(*grouped_rows())
    plain, _ = counted_gradients(model, scorer, rows)
    set_recomputation(model, wanted)
    again, _ = counted_gradients(model, scorer, rows)
    assert all(torch.equal(plain[n], again[n]) for n in plain)
    assert not any(module.training for module in model.modules())


@pytest.mark.parametrize("wanted", ["selective", "full"])
def test_nothing_is_recomputed_without_gradients(wanted):
    model = tiny()
    scorer = Scorer(model, temperature=1.0)
    rows = scorer.pack(*grouped_rows())
    set_recomputation(model, wanted)
    with torch.no_grad():
        values = scorer.sequence_logprobs(rows)
    assert not values.requires_grad


@pytest.mark.parametrize(("mode", "times"), [("Always", 2), ("Selective", 2), ("Never", 1), ("Auto", 1)])
def test_setting_decides_on_a_cpu_where_auto_means_never(mode, times):
    model = tiny_llama().eval()
    scorer = Scorer(model, temperature=1.0)
    memory = ActivationMemory(model, scorer)
    for setting in ("Always", "Selective", mode):
        memory.configure(TrainerSettings(activation_checkpointing=setting))
    runs: list[int] = []
    layers_of(model)[0].mlp.act_fn.register_forward_hook(lambda *_: runs.append(1))
    scorer.sequence_logprobs(scorer.pack(*grouped_rows())).sum().backward()
    assert len(runs) == times


def test_as_little_is_recomputed_as_lets_a_micro_batch_fit_into_free_memory():
    measured = {"none": 1000.0, "selective": 500.0}
    assert cheapest_that_fits(measured, 1000, 2_000_000) == "none"
    assert cheapest_that_fits(measured, 2000, 2_000_000) == "selective"
    assert cheapest_that_fits(measured, 4000, 2_000_000) == "full"
    assert cheapest_that_fits({"none": 1000.0}, 2000, 2_000_000) == "full", "where selective does not work"
    assert cheapest_that_fits(measured, 1, -5) == "full", "what is owed already leaves nothing"


def test_the_share_of_a_colocated_engine_is_not_free_before_it_has_started():
    assert spare_bytes(free=80, total=100, own=15, engine_share=0.0) == 80
    assert spare_bytes(free=80, total=100, own=15, engine_share=0.4) == 45
    assert spare_bytes(free=40, total=100, own=15, engine_share=0.4) == 40, "it is there"
    assert spare_bytes(free=30, total=100, own=70, engine_share=0.4) == -10


@pytest.mark.parametrize("wanted", ["selective", "full"])
def test_model_without_such_layers_refuses(wanted):
    with pytest.raises(UserError, match="set Never"):
        set_recomputation(torch.nn.Linear(1, 1), wanted)
