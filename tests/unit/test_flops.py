"""FLOPs by hand, and against a count of the operations that torch really does."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.learning import tiny_llama
from torch.utils.flop_counter import FlopCounterMode

from tba.flops import ModelShape, model_shape, peak_flops, utilisation

SMOLLM2 = {
    "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
    "vocab_size": 49152, "intermediate_size": 1536,
}  # fmt: skip


def llama_tensors(config):
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    narrow = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        for name, shape in (
            ("q_proj", (hidden, hidden)), ("k_proj", (narrow, hidden)), ("v_proj", (narrow, hidden)),
            ("o_proj", (hidden, hidden)), ("gate_proj", (inner, hidden)), ("up_proj", (inner, hidden)),
            ("down_proj", (hidden, inner)), ("norm", (hidden,)),
        ):  # fmt: skip
            yield f"model.layers.{layer}.{name}.weight", shape


def test_a_real_model_by_hand():
    shape = model_shape(SMOLLM2, llama_tensors(SMOLLM2))
    # A layer: q and o 2 x 576^2, k and v 2 x 192 x 576, three matrices of 576 x 1536.
    layer = 2 * 576**2 + 2 * 192 * 576 + 3 * 576 * 1536
    assert shape == ModelShape(30 * layer, 576 * 49152, 576, (None,) * 30)
    # 3 tokens attend to 1 + 2 + 3 positions; logits for the last of them.
    assert shape.forward(3, 1) == 2 * 30 * layer * 3 + 2 * 576 * 49152 + 4 * 576 * 30 * 6


def counted(model, length, logits):
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.zeros((1, length), dtype=torch.int64), logits_to_keep=logits)
    return counter.get_total_flops()


@pytest.mark.parametrize("length", [1, 7, 40])
def test_matrices_and_head_are_what_torch_counts(length):
    model = tiny_llama().eval()
    model.set_attn_implementation("eager")
    shape = model_shape(model.config.to_dict(), [(n, tuple(p.shape)) for n, p in model.named_parameters()])
    assert shape is not None
    # torch counts the whole square of the eager attention; ours is its causal half, the diagonal included.
    square, ours = 4 * 16 * 2 * length**2, 4 * 16 * 2 * length * (length + 1) // 2
    assert shape.forward(length, 3 if length > 3 else 1) - ours == pytest.approx(
        counted(model, length, 3 if length > 3 else 1) - square
    )


@given(st.integers(1, 300), st.integers(1, 300), st.sampled_from([None, 1, 50]))
def test_generating_costs_what_one_pass_over_all_would_but_for_the_last_token(prompt, response, window):
    shape = ModelShape(1000, 500, 8, (None, window))
    whole = shape.forward(prompt + response - 1, response)
    assert shape.forward(prompt, 0) + shape.generate(prompt, response) == pytest.approx(whole)


@given(st.integers(1, 200), st.integers(1, 50))
def test_a_window_is_counted_position_by_position(length, window):
    shape = ModelShape(0, 0, 1, (window,))
    assert shape.forward(length, 0) == 4 * sum(min(t, window) for t in range(1, length + 1))


def test_sliding_windows_are_those_of_the_layers_that_have_them():
    kinds = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 4, "num_hidden_layers": 2}
    tensors = [("q", (8, 8))]
    base = {"hidden_size": 8, "num_attention_heads": 2, "vocab_size": 10}
    assert model_shape({**base, **kinds}, tensors).windows == (None, 4)
    assert model_shape({**base, "num_hidden_layers": 2, "sliding_window": 4}, tensors).windows == (4, 4)
    unused = {"sliding_window": 4, "use_sliding_window": False}
    assert model_shape({**base, "num_hidden_layers": 1, **unused}, tensors).windows == (None,)


@pytest.mark.parametrize(
    "change",
    [
        {"num_local_experts": 8}, {"n_routed_experts": 64}, {"kv_lora_rank": 512}, {"is_encoder_decoder": True},
        {"vision_config": {"hidden_size": 1}, "text_config": SMOLLM2},
        {"vision_config": {"hidden_size": 1}}, {"layer_types": ["full_attention", "linear_attention"]},
        {"num_attention_heads": None}, {"hidden_size": None},
    ],
)  # fmt: skip
def test_anything_but_a_dense_decoder_of_text_has_no_count(change):
    assert model_shape(SMOLLM2 | change, llama_tensors(SMOLLM2)) is None


def test_adapters_and_tables_alone_are_no_model():
    names = ["model.embed_tokens.weight", "lm_head.weight", "transformer.wte.weight", "q_proj.lora_A.weight"]
    assert model_shape(SMOLLM2, [(name, (10, 10)) for name in names]) is None


def test_a_head_of_its_own_size_makes_attention_wider():
    config = SMOLLM2 | {"head_dim": 128}
    assert model_shape(config, llama_tensors(SMOLLM2)).attention_width == 9 * 128


@pytest.mark.parametrize(
    ("gpu", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", 989.5), ("NVIDIA H100 PCIe", 756.5), ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.5), ("NVIDIA H200 NVL", 835.5), ("NVIDIA GH200 480GB", 990.0),
        ("NVIDIA B200", 2250.0), ("NVIDIA GB200", 2500.0), ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A100 80GB PCIe", 312.0), ("NVIDIA L40S", 362.0), ("NVIDIA L40", 181.0), ("NVIDIA L4", 121.0),
        ("NVIDIA A10", 125.0), ("NVIDIA H20", 148.0),
    ],
)  # fmt: skip
def test_the_peak_of_a_known_gpu_is_its_data_sheets(gpu, tera):
    assert peak_flops(gpu, "bfloat16") == tera * 1e12
    assert peak_flops(gpu, "bfloat16", 4) == 4 * tera * 1e12


@pytest.mark.parametrize(
    ("gpu", "dtype"),
    [
        (None, "bfloat16"), ("NVIDIA H100 80GB HBM3", "float32"), ("NVIDIA A10G", "bfloat16"), ("Tesla T4", "bfloat16"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bfloat16"), ("NVIDIA A1000", "bfloat16"),
        ("NVIDIA RTX A4000", "bfloat16"), ("NVIDIA H2000", "bfloat16"),
    ],
)  # fmt: skip
def test_no_peak_is_ever_made_up(gpu, dtype):
    assert peak_flops(gpu, dtype) is None


def test_utilisation_needs_work_time_and_a_peak():
    assert utilisation(5e12, 2.0, 1e13) == 0.25
    assert [utilisation(5e12, 2.0, None), utilisation(5e12, 0.0, 1e13), utilisation(0.0, 2.0, 1e13)] == [None] * 3
