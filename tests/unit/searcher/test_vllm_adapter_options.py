"""What vLLM is told of an adapter, and what it reads of one."""

import json
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from support.learning import tiny_llama

from tba.contracts.config import LoRA
from tba.lora import attach, targets_of
from tba.searcher.engines.vllm_adapter import (
    adapter_folder,
    adapter_shapes,
    lora_arguments,
    obstacle,
    served_rank,
)
from tba.searcher.engines.vllm_weights import WeightLoader

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
KNOWN = {"enable_lora", "max_loras", "max_cpu_loras", "max_lora_rank", "lora_target_modules"}


@given(st.integers(1, 600))
def test_the_rank_is_the_least_that_holds_the_adapter(rank):
    found = served_rank(rank, RANKS)
    assert (found is None) == (rank > 512)
    if found is not None:
        assert found >= rank and not any(rank <= r < found for r in RANKS)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, None),
        ({"dtype": "float32"}, None),
        ({"merge": True}, "mergeAdapter asks for it"),
        ({"supported": False}, "no adapters for this model"),
        ({"lora": LoRA(rank=513)}, "at most 512 ranks, not 513"),
        ({"dtype": "float32", "cpu": False}, "compute in 16 bits, and in float32 merging loses nothing"),
        ({"cpu": False}, None),
    ],
)
def test_what_vllm_cannot_have_beside_its_base_is_said(changes, told):
    settings = {"lora": LoRA(), "merge": False, "supported": True, "dtype": "bfloat16", "cpu": True} | changes
    found = obstacle(settings.pop("lora"), ranks=RANKS, **settings)
    assert found is None if told is None else told in found


def test_only_the_targets_and_what_vllm_packs_them_into_have_places_for_an_adapter():
    lora = LoRA(rank=20, target_modules=["q_proj", "layers.0.mlp.down_proj"])
    made = lora_arguments(lora, ranks=RANKS, packed=PACKED, known=KNOWN)
    assert made == {
        "enable_lora": True,
        "max_loras": 1,
        "max_cpu_loras": 1,
        "max_lora_rank": 32,
        "lora_target_modules": ["down_proj", "q_proj", "qkv_proj"],
    }
    older = lora_arguments(lora, ranks=RANKS, packed=PACKED, known=KNOWN - {"lora_target_modules"})
    assert "lora_target_modules" not in older


def test_the_shapes_are_those_of_the_adapter_that_a_trainer_attaches():
    lora = LoRA(rank=3, target_modules=["q_proj", "down_proj"])
    expected = adapter_shapes(targets_of(tiny_llama(), lora), lora)
    assert expected == {n: list(t.shape) for n, t in attach(tiny_llama(), lora).tensors().items()}


@pytest.mark.parametrize("scale", [2.0, 0.3, 7 / 5])
def test_vllm_reads_an_adapter_whose_scale_is_one_with_ours_in_b(scale):
    """By its own rule, alpha / r."""
    lora = LoRA(rank=5, alpha=99.0)
    adapter = {"m.lora_A.weight": torch.randn(5, 8), "m.lora_B.weight": torch.randn(4, 5)}
    with adapter_folder(adapter, lora, scale=scale) as folder:
        settings = json.loads((folder / "adapter_config.json").read_text())
        read = load_file(folder / "adapter_model.safetensors")
    assert settings["lora_alpha"] / settings["r"] == 1.0 and not settings.get("use_rslora")
    assert torch.equal(read["base_model.model.m.lora_A.weight"], adapter["m.lora_A.weight"])
    exact = adapter["m.lora_B.weight"].double() * scale
    assert torch.equal(read["base_model.model.m.lora_B.weight"], exact.float())
    assert not folder.exists()


def test_parts_that_vllm_has_no_place_for_are_named():
    one = SimpleNamespace(lora_a=torch.zeros(2, 2))
    packed = SimpleNamespace(lora_a=[torch.zeros(2, 2), None, torch.zeros(2, 2)])
    loaded = SimpleNamespace(loras={"qkv_proj": packed, "o_proj": one, "elsewhere": one})
    manager = SimpleNamespace(modules={"qkv_proj": 0, "o_proj": 0}, get_adapter=lambda number: {1: loaded}[number])
    worker = SimpleNamespace(model_runner=SimpleNamespace(lora_manager=SimpleNamespace(_adapter_manager=manager)))
    assert WeightLoader.tba_adapted(worker, 1) == (4, ["elsewhere"])  # type: ignore[arg-type]
