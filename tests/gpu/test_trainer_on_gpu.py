"""The trainer's CUDA paths against plain float32 on the same card: kernels, memory, waits. Skips loudly without a GPU.

PYTHONPATH=workloads:tests python -m pytest tests/gpu/test_trainer_on_gpu.py -q
"""

import warnings

import numpy as np
import pytest
import torch
from support.learning import feed, live_config, make_shard, run_config
from support.scoring import gradients, grouped_rows, one_by_one, tiny

from tba.contracts.config import LoRA, TrainerSettings
from tba.scoring import Scorer
from tba.scoring.attention import flash_reason
from tba.trainer.adapted import make_policy
from tba.trainer.learner import Learner
from tba.trainer.memory import activation_bytes
from tba.trainer.model import Policy
from tba.trainer.recomputation import layers_of, set_recomputation

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="NO GPU: the trainer's CUDA paths are untested here"),
    pytest.mark.filterwarnings("ignore"),  # those of torch's own compiler
]
WIDE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "initializer_range": 0.1}


GATED = 6 * WIDE["hidden_size"]
"""As wide a network as models of some billions have, whose product is most of what can be computed again."""


def on_gpu(family: str = "llama", dtype: torch.dtype = torch.bfloat16, **changes):
    return tiny(family, **{**WIDE, **changes}).to("cuda", dtype)


def relative(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """Distance of all gradients together."""
    difference = sum((got[n].float() - wanted[n].float()).square().sum() for n in wanted)
    return float(difference.sqrt() / sum(g.float().square().sum() for g in wanted.values()).sqrt())


def exact(family: str, prompts, responses, **changes) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """float32 of the same (bf16) weights, one row at a time."""
    model = on_gpu(family, **changes).float().cpu()
    values = one_by_one(model, prompts, responses)
    values.sum().backward()
    return values.detach().cuda(), {n: g.cuda() for n, g in gradients(model).items()}


@pytest.mark.parametrize(
    ("family", "changes"),
    [("llama", {}), ("llama", {"num_key_value_heads": 4}), ("mistral", {"sliding_window": 4}), ("qwen3", {})],
)
@pytest.mark.parametrize("compiled", [False, True])
def test_variable_length_kernel_scores_shared_prompts_as_single_rows_in_float32(family, changes, compiled):
    prompts, responses = grouped_rows(rows=24)
    values, wanted = exact(family, prompts, responses, **changes)
    model = on_gpu(family, **changes)
    scorer = Scorer(model, temperature=1.0)
    assert scorer.layout == "varlen", scorer.refused
    if compiled:
        for layer in layers_of(model):
            layer.compile(dynamic=True)
        scorer.compile_head()
    got = scorer.sequence_logprobs(scorer.pack(prompts, responses))
    got.sum().backward()
    assert ((got.detach() - values).abs() / torch.tensor([len(r) for r in responses]).cuda()).mean() < 0.05
    assert relative(gradients(model), wanted) < 0.05


def test_float32_takes_buckets_and_is_exact():
    prompts, responses = grouped_rows()
    values, wanted = exact("llama", prompts, responses)
    model = on_gpu().float()
    scorer = Scorer(model, temperature=1.0)
    assert scorer.layout == "buckets" and "dtype" in scorer.refused["varlen"]
    got = scorer.sequence_logprobs(scorer.pack(prompts, responses))
    got.sum().backward()
    torch.testing.assert_close(got.detach(), values, atol=1e-3, rtol=1e-4)
    assert relative(gradients(model), wanted) < 1e-3


def learner(dtype: str = "bfloat16", **objective) -> Learner:
    config = run_config(**objective)
    config = config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})})
    policy = Policy(
        tiny("llama", **WIDE).cuda(), config=config.model, reference=config.objective.reference, temperature=1.0
    )
    made = Learner(policy, config)
    feed(made, make_shard(0))
    return made


def adapted_learner() -> Learner:
    """Trains an adapter of all linear layers of the decoder, on memory that has been planned."""
    config = run_config(learningRate=1e-2)
    lora = LoRA(rank=4, target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"])
    model = config.model.model_copy(update={"dtype": "bfloat16", "lora": lora})
    config = config.model_copy(update={"model": model})
    policy = make_policy(
        tiny("llama", **WIDE).cuda(), config=model, reference=config.objective.reference, temperature=1.0
    )
    made = Learner(policy, config)
    feed(made, make_shard(0))
    return made


def settings(**changes):
    return live_config().model_copy(update={"trainer": TrainerSettings(**changes)})


def test_policy_equal_to_its_reference_has_no_log_ratio_at_all_in_the_same_micro_batch():
    assert not learner().train_step(settings(), epoch=1).ell.any()


@pytest.mark.parametrize(
    "changes",
    [
        {"micro_batch_tokens": 20},
        {"activation_checkpointing": "Always"},
        {"activation_checkpointing": "Selective"},
        {"offload_reference": True},
        {"compile": True},
    ],
)
def test_settings_change_the_gradient_by_rounding_only(changes):
    found = []
    for each in ({"activation_checkpointing": "Never"}, changes):
        made = learner(optimizer={"maxGradNorm": None})
        made.train_step(settings(**each), epoch=1)
        found.append({n: p.grad for n, p in made.policy.model.named_parameters()})
        for _ in range(3):
            assert np.isfinite(made.train_step(settings(**each), epoch=1).ell).all()
    assert relative(found[1], found[0]) < 0.03


@pytest.mark.parametrize("recomputed", ["Auto", "Selective", "Always"])
def test_an_adapter_learns_while_its_base_stays_bit_for_bit(recomputed):
    made = adapted_learner()
    base = {n: p.clone() for n, p in made.policy.model.named_parameters() if not p.requires_grad}
    first = made.train_step(settings(activation_checkpointing=recomputed), epoch=1)
    later = [made.train_step(settings(activation_checkpointing=recomputed), epoch=1) for _ in range(3)]
    assert not first.ell.any() and all(np.isfinite(r.ell).all() and r.ell.any() for r in later)
    now = dict(made.policy.model.named_parameters())
    assert all(torch.equal(now[n], p) for n, p in base.items())
    assert {t.dtype for n, t in made.policy.stage().items() if n in base} == {torch.bfloat16}


def test_step_waits_for_the_gpu_at_the_gradient_norm_alone():
    made = learner()
    for _ in range(2):
        made.train_step(settings(activation_checkpointing="Never"), epoch=1)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            made.buffer.set_reference("again")  # the reference's pass is part of the step
            made.train_step(settings(activation_checkpointing="Never"), epoch=1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [str(warning.message) for warning in caught]
    assert len([w for w in waits if "synchron" in w]) <= 1, waits


def test_recomputed_layers_keep_less_memory():
    rows = [np.arange(40) % 40] * 64
    peaks = []
    for wanted in ("none", "selective", "full"):
        model = on_gpu(num_hidden_layers=8, intermediate_size=GATED)
        scorer = Scorer(model, temperature=1.0)
        set_recomputation(model, wanted)
        packed = scorer.pack([np.array([i % 40, 1]) for i in range(64)], rows)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        scorer.sequence_logprobs(packed).sum().backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] < 0.75 * peaks[0] and peaks[2] < 0.6 * peaks[0]


def test_what_selective_recomputation_keeps_is_measured():
    model = on_gpu(num_hidden_layers=8, intermediate_size=GATED)
    measured = activation_bytes(model, Scorer(model, temperature=1.0))
    assert measured["selective"] < 0.75 * measured["none"]


def test_flash_is_possible_on_this_card():
    assert flash_reason(torch.device("cuda", 0), torch.bfloat16, 64) is None
