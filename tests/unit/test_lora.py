"""Adapters on linear layers, and weights with one merged in."""

import pytest
import torch
from support.learning import tiny_llama
from torch.nn.functional import linear
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.models.llama.modeling_llama import LlamaMLP

from tba.contracts.config import LoRA
from tba.contracts.errors import CorruptObject, UserError
from tba.lora import attach, merged, peft_files, refuse_uncalled, scale_of, try_targets
from tba.models import load_weights, weight_tensors

TOKENS = torch.tensor([[1, 5, 9, 3, 3, 7]])
SETTINGS = LoRA(rank=3, alpha=12.0, target_modules=["q_proj", "down_proj"])


def adapted(settings: LoRA = SETTINGS, *, trained: bool = True):
    torch.manual_seed(0)
    model = tiny_llama().eval()
    base = {n: t.clone() for n, t in weight_tensors(model).items()}
    adapter = attach(model, settings)
    if trained:
        for tensor in adapter.tensors().values():
            tensor.normal_(std=0.3)
    return model, base, adapter


@torch.no_grad()
def test_merged_weights_answer_as_the_adapter_beside_the_base():
    model, base, adapter = adapted()
    plain = tiny_llama().eval()
    load_weights(plain, merged(base, adapter.tensors(), scale=4.0))
    difference = (plain(TOKENS).logits - model(TOKENS).logits).abs().max()
    load_weights(plain, base)
    assert difference < 1e-5 < (plain(TOKENS).logits - model(TOKENS).logits).abs().max()


@torch.no_grad()
def test_with_the_adapter_off_or_untrained_the_model_is_its_base_bit_for_bit():
    model, base, adapter = adapted()
    plain = tiny_llama().eval()
    load_weights(plain, base)
    with adapter.off():
        assert torch.equal(model(TOKENS).logits, plain(TOKENS).logits)
    assert not torch.equal(model(TOKENS).logits, plain(TOKENS).logits), "on again"
    assert torch.equal(adapted(trained=False)[0](TOKENS).logits, plain(TOKENS).logits)


def test_only_the_adapter_is_trained_and_it_begins_the_same_each_time():
    model, base, adapter = adapted(trained=False)
    assert {n for n, p in model.named_parameters() if p.requires_grad} == set(adapter.tensors())
    shapes = {n: tuple(t.shape) for n, t in adapter.tensors().items() if "layers.1.mlp" in n}
    name = "model.layers.1.mlp.down_proj"
    assert shapes == {f"{name}.lora_A.weight": (3, 32), f"{name}.lora_B.weight": (16, 3)}
    again = adapted(trained=False)[2].tensors()
    assert all(torch.equal(t, again[n]) for n, t in adapter.tensors().items())
    first = [t for n, t in again.items() if "lora_A" in n]
    assert not torch.equal(first[0], first[2]), "layers begin apart"
    assert base.keys() <= weight_tensors(model).keys(), "the base keeps its names"


def test_merging_rounds_once_from_float32_and_leaves_the_rest_as_it_is():
    _, base, adapter = adapted()
    half = {n: t.bfloat16() for n, t in base.items()}
    found = merged(half, adapter.tensors(), scale=scale_of(SETTINGS))
    name = "model.layers.0.self_attn.q_proj"
    a, b = (adapter.tensors()[f"{name}.lora_{part}.weight"].double() for part in "AB")
    exact = half[f"{name}.weight"].double() + 4.0 * b @ a
    assert found[f"{name}.weight"].dtype == torch.bfloat16
    assert ((found[f"{name}.weight"].double() - exact).abs() <= exact.abs() * 2**-8 + 1e-6).all()
    changed = {n for n in half if found[n] is not half[n]}
    assert len(changed) == 4 and all("q_proj" in n or "down_proj" in n for n in changed)


@pytest.mark.parametrize("break_it", ["half", "rank", "stranger", "empty"])
def test_an_adapter_of_another_base_is_refused(break_it):
    _, base, adapter = adapted()
    tensors = adapter.tensors()
    name = next(n for n in tensors if n.endswith("lora_A.weight"))
    if break_it == "half":
        del tensors[name]
    elif break_it == "rank":
        tensors[name] = tensors[name][:2]
    elif break_it == "empty":
        tensors = {}
    else:
        tensors = {n.replace("layers.0", "layers.7"): t for n, t in tensors.items()}
    with pytest.raises(CorruptObject, match="adapter"):
        merged(base, tensors, scale=1.0)


@pytest.mark.parametrize(
    ("targets", "told"),
    [
        (["q_proj", "nothing"], r"no module is named \['nothing'\]: choose among \[.*'q_proj'"),
        (["lm_head"], "lm_head is the output embedding"),
        (["embed_tokens"], "embed_tokens is a Embedding"),
        (["mlp"], "mlp is a LlamaMLP"),
    ],
)
def test_targets_that_can_have_no_adapter_are_named(targets, told):
    with pytest.raises(UserError, match=told):
        attach(tiny_llama(), LoRA(target_modules=targets))


def reads_its_gate(self, x):
    """An MLP that multiplies with the weight of a layer in place of calling it."""
    return self.down_proj(self.act_fn(linear(x, self.gate_proj.weight)) * self.up_proj(x))


def test_a_layer_whose_weight_is_read_and_that_is_never_called_can_have_no_adapter(monkeypatch):
    monkeypatch.setattr(LlamaMLP, "forward", reads_its_gate)
    model = tiny_llama()
    told = r"reads the weight of model\.layers\.\*\.mlp\.gate_proj and never calls it"
    with pytest.raises(UserError, match=told):
        try_targets(model, LoRA(rank=2, target_modules=["q_proj", "gate_proj"]))
    try_targets(model, LoRA(rank=2, target_modules=["q_proj", "up_proj", "down_proj"]))
    assert not any(module._forward_hooks for module in model.modules())


def test_an_expert_that_no_token_goes_to_is_no_reason_to_refuse_its_kind():
    experts = [f"model.layers.{layer}.mlp.experts.{expert}.up_proj" for layer in range(2) for expert in range(8)]
    refuse_uncalled(experts, experts[3:4])
    with pytest.raises(UserError, match=r"weight of model\.layers\.\*\.mlp\.experts\.\*\.up_proj"):
        refuse_uncalled(experts, ["model.layers.0.mlp.up_proj"])


def test_a_model_that_cannot_compute_where_it_is_loaded_is_looked_at_later(monkeypatch):
    def wants_a_gpu(self, x):
        raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")

    monkeypatch.setattr(LlamaMLP, "forward", wants_a_gpu)
    try_targets(tiny_llama(), LoRA(rank=2, target_modules=["gate_proj"]))


def test_a_model_without_linear_layers_is_told_so():
    model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=20, bos_token_id=1, eos_token_id=1))
    with pytest.raises(UserError, match=r"named \['q_proj'\]: this model has no linear layer; remove model\.lora"):
        attach(model, LoRA(target_modules=["q_proj"]))


@pytest.mark.parametrize("shared", ["weight", "module"])
def test_a_weight_that_two_modules_hold_can_have_no_adapter(shared):
    """Beside one of them it would change that one alone, merged it would change both."""
    model = tiny_llama()
    first, second = (layer.self_attn for layer in model.model.layers)
    if shared == "module":
        second.q_proj = first.q_proj
    else:
        second.q_proj.weight = first.q_proj.weight
    for target in ("layers.0.self_attn.q_proj", "q_proj"):
        with pytest.raises(UserError, match="q_proj is a Linear that shares its weight"):
            attach(model, LoRA(target_modules=[target]))
    attach(model, LoRA(target_modules=["v_proj"]))


@torch.no_grad()
def test_a_block_that_is_used_twice_has_one_adapter_that_works_in_both_places():
    torch.manual_seed(0)
    model = tiny_llama().eval()
    model.model.layers[1] = model.model.layers[0]
    base = {n: t.clone() for n, t in weight_tensors(model).items()}
    adapter = attach(model, SETTINGS)
    for tensor in adapter.tensors().values():
        tensor.normal_(std=0.3)
    logits = model(TOKENS).logits
    with adapter.off():
        before = model(TOKENS).logits
        load_weights(model, merged(base, adapter.tensors(), scale=4.0) | adapter.tensors())
        assert (model(TOKENS).logits - logits).abs().max() < 1e-5 < (before - logits).abs().max()


def test_a_rank_that_no_target_has_is_refused():
    """It would take memory for nothing, or all of it."""
    sides = LoRA(rank=17, target_modules=["q_proj", "down_proj"])  # 16 x 16, 16 x 32
    with pytest.raises(UserError, match="rank must be <= 16, the side of its targets, got 17"):
        attach(tiny_llama(), sides)
    attach(tiny_llama(), sides.model_copy(update={"rank": 16}))


def test_a_scale_that_overflows_is_refused():
    with pytest.raises(UserError, match=r"alpha / rank must be a float32 number, got 5e\+38: lower alpha"):
        attach(tiny_llama(), LoRA(rank=2, alpha=1e39))


def test_peft_names_and_settings():
    tensors, settings = peft_files(adapted()[2].tensors(), SETTINGS, uri="hf://org/name", revision="abc")
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in tensors and len(tensors) == 8
    assert (settings["r"], settings["lora_alpha"], settings["peft_type"]) == (3, 12.0, "LORA")
    assert settings["target_modules"] == ["down_proj", "q_proj"]


@pytest.mark.parametrize(
    ("uri", "name", "revision"),
    [
        ("hf://org/name", "org/name", "abc"),
        ("file:///models/base", "/models/base", None),
        ("s3://bucket/base", "s3://bucket/base", None),
        (None, None, None),
    ],
)
def test_the_base_is_named_as_from_pretrained_takes_it(uri, name, revision):
    """PEFT loads it by name and revision: a URI would be no name, and another revision another model."""
    settings = peft_files({}, SETTINGS, uri=uri, revision="abc")[1]
    assert (settings["base_model_name_or_path"], settings["revision"]) == (name, revision)
