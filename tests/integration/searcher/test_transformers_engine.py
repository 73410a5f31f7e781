import numpy as np
import pytest
import torch
from support.engines import (
    MAX_TOKENS,
    PROMPTS,
    Manifest,
    Weights,
    full_logprobs,
    model_of,
    request,
    response_logprobs,
    run,
)
from support.tiny_models import save_tiny
from transformers import AutoModelForCausalLM

from tba.contracts.config import LoRA
from tba.contracts.errors import UserError
from tba.contracts.records import FinishReason, PolicyId, Span
from tba.lora import attach, merged
from tba.models import build_model, weight_tensors
from tba.searcher.engines.engine import Response
from tba.searcher.engines.transformers import TransformersEngine


@pytest.fixture(scope="module")
def assets(tmp_path_factory) -> dict[str, bytes]:
    folder = save_tiny(tmp_path_factory.mktemp("tiny"), tied=True)
    skip = {"model.safetensors", "generation_config.json"}
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.name not in skip}


def weights(assets, seed: int, *, eos_bias: float = 0.0) -> Weights:
    torch.manual_seed(seed)
    model, _ = build_model(assets, dtype=torch.float32, device="cpu")
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.3) if p.dim() > 1 else p.fill_(1.0)
    return Weights(Manifest(PolicyId(1, seed)), {n: t.clone() for n, t in weight_tensors(model).items()}, assets)


def engine(loaded: Weights | None = None, **more) -> TransformersEngine:
    made = TransformersEngine(dtype=torch.float32, device="cpu", max_model_len=64, **more)
    if loaded is not None:
        made.load(loaded)  # type: ignore[arg-type]
    return made


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_recorded_logprobs_are_those_of_a_full_forward_pass(assets, temperature):
    loaded = weights(assets, 0)
    requests = [request(i, temperature=temperature) for i in range(12)]
    done = run(engine(loaded, max_rows=5), requests)  # 5 rows: requests join and leave a running batch
    assert len(done) == 12 and {len(r.tokens) for r in done.values()} != {MAX_TOKENS}
    for r in requests:
        expected = full_logprobs(loaded, r.prompt_tokens, done[r.id].tokens, temperature)
        assert np.allclose(done[r.id].logprobs, expected, atol=1e-4)


def test_a_response_does_not_depend_on_its_batch(assets):
    loaded = weights(assets, 0)
    together = run(engine(loaded, max_rows=16), [request(i) for i in range(16)])
    crowded = run(engine(loaded, max_rows=3), [request(i) for i in reversed(range(16))])
    for i in range(16):
        alone = run(engine(loaded), [request(i)])[i]
        assert alone.tokens == together[i].tokens == crowded[i].tokens
        assert np.allclose(alone.logprobs, crowded[i].logprobs, atol=1e-5)


def test_equal_prompts_with_other_seeds_differ(assets):
    done = run(engine(weights(assets, 0)), [request(i, prompt=PROMPTS[0]) for i in range(8)])
    assert len({tuple(r.tokens) for r in done.values()}) > 4


def test_end_of_sequence_is_the_last_token_and_the_limit_has_none(assets):
    done = run(engine(weights(assets, 0)), [request(i, max_tokens=12) for i in range(64)])
    stopped = [r for r in done.values() if r.finish_reason is FinishReason.STOP]
    limited = [r for r in done.values() if r.finish_reason is FinishReason.LENGTH]
    assert stopped and limited
    assert all(r.tokens[-1] == 12 and 12 not in r.tokens[:-1] for r in stopped)
    assert all(len(r.tokens) == 12 and 12 not in r.tokens for r in limited)
    assert all(len(r.logprobs or []) == len(r.tokens) == sum(s.num_tokens for s in r.spans) for r in done.values())


def test_greedy_equals_generate(assets, tmp_path):
    loaded = weights(assets, 3)
    made = engine(loaded, max_rows=2)
    done = run(made, [request(i, greedy=True) for i in range(3)])
    for i in range(3):
        ids = torch.tensor([PROMPTS[i]])
        out = made._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=MAX_TOKENS,
            do_sample=False,
            eos_token_id=12,
            pad_token_id=13,
        )
        assert done[i].tokens == out[0, ids.shape[1] :].tolist()


@torch.no_grad()
def test_an_adapter_merged_at_a_swap_answers_as_the_one_beside_its_base(assets):
    base = weights(assets, 1)
    made = engine(base)
    model = model_of(base)
    adapter = attach(model, LoRA(rank=4, alpha=8.0, target_modules=["q_proj", "v_proj", "down_proj"]))
    for tensor in adapter.tensors().values():
        tensor.normal_(std=0.3)
    made.load(Weights(Manifest(PolicyId(1, 2)), merged(base.tensors, adapter.tensors(), scale=2.0), base.assets))  # type: ignore[arg-type]
    requests = [request(i) for i in range(3)]
    done = run(made, requests)
    for r in requests:
        tokens = done[r.id].tokens
        wanted = response_logprobs([(model, len(tokens))], r.prompt_tokens, tokens)
        assert np.allclose(done[r.id].logprobs, wanted, atol=1e-4)
        with adapter.off():  # a control
            without = response_logprobs([(model, len(tokens))], r.prompt_tokens, tokens)
        assert not np.allclose(wanted, without, atol=1e-2)


def test_two_swaps_in_one_response_give_three_spans_and_their_logprobs(assets):
    first, second, third = (weights(assets, s) for s in (0, 1, 2))
    made = engine(first)
    for i in range(24):
        made.submit(request(i, prompt=PROMPTS[1]))
    done: list[Response] = []
    for loaded in (first, second, third):
        made.load(loaded)  # type: ignore[arg-type]
        for _ in range(3):
            done += made.step()
    while made.in_flight:
        done += made.step()
    long = [r for r in done if len(r.tokens) > 6]
    assert long
    for response in long:
        assert response.spans == [Span(3, 1, 0), Span(3, 1, 1), Span(len(response.tokens) - 6, 1, 2)]
        before = full_logprobs(first, PROMPTS[1], response.tokens, 1.0)
        assert np.allclose((response.logprobs or [])[:3], before[:3], atol=1e-4)


def test_after_a_swap_new_requests_are_those_of_a_fresh_engine(assets):
    made = engine(weights(assets, 0))
    run(made, [request(i) for i in range(4)])
    made.load(weights(assets, 1))  # type: ignore[arg-type]
    swapped = run(made, [request(i) for i in range(4)])
    fresh = run(engine(weights(assets, 1)), [request(i) for i in range(4)])
    assert {i: r.tokens for i, r in swapped.items()} == {i: r.tokens for i, r in fresh.items()}


def test_rows_in_flight_survive_a_swap_with_joins(assets):
    made = engine(weights(assets, 0), max_rows=4)
    for i in range(10):
        made.submit(request(i))
    done = []
    for _ in range(4):
        done += made.step()
    made.load(weights(assets, 1))  # type: ignore[arg-type]
    while made.in_flight:
        done += made.step()
    assert sorted(r.id for r in done) == list(range(10))
    assert {s.version for r in done for s in r.spans} == {0, 1}


def test_a_stop_string_ends_a_response_and_is_kept(assets):
    done = run(engine(weights(assets, 0)), [request(i, stop=("1", "+")) for i in range(16)])
    for r in done.values():
        assert not {1, 10} & set(r.tokens[:-1])
        if r.tokens[-1] in (1, 10):
            assert r.finish_reason is FinishReason.STOP
    assert any(r.tokens[-1] in (1, 10) for r in done.values())


def test_sampled_frequencies_are_the_model_s_probabilities(assets):
    loaded = weights(assets, 0)
    done = run(engine(loaded), [request(i, prompt=PROMPTS[0], max_tokens=1) for i in range(4000)])
    made = engine(loaded)
    with torch.no_grad():
        p = made._model(torch.tensor([PROMPTS[0]])).logits[0, -1].softmax(-1).numpy()
    counts = np.bincount([r.tokens[0] for r in done.values()], minlength=14)
    assert np.all(np.abs(counts / 4000 - p) < 4.5 * np.sqrt(p * (1 - p) / 4000) + 1e-9)


def test_capacity_bounds_the_rows_and_small_models_get_many(assets):
    made = engine(weights(assets, 0), max_rows=3)
    for i in range(9):
        made.submit(request(i))
    while made.in_flight:
        made.step()
        assert len(made._rows) <= 3
    assert engine(weights(assets, 0)).capacity == 512
    assert engine(weights(assets, 0), kv_cache_bytes=1).capacity == 16


def test_a_prompt_that_does_not_fit_is_an_error_of_its_own_response(assets):
    done = run(engine(weights(assets, 0)), [request(0, max_tokens=60), request(1, max_tokens=2)])
    assert "maxModelLen" in (done[0].error or "")
    assert done[0].tokens == [] and done[0].spans == [Span(0, 1, 0)]
    assert done[1].error is None


def test_submitting_before_weights_is_a_bug(assets):
    with pytest.raises(RuntimeError, match="load"):
        engine().submit(request(0))


def test_abort_forgets_everything(assets):
    made = engine(weights(assets, 0))
    for i in range(3):
        made.submit(request(i))
    made.step()
    made.abort()
    assert made.in_flight == 0 and made.step() == []


def test_layers_that_cannot_be_cached_are_refused(tmp_path):
    from transformers import Qwen3NextConfig

    config = Qwen3NextConfig(
        vocab_size=14, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, num_experts=2, moe_intermediate_size=8, shared_expert_intermediate_size=8,
        layer_types=["linear_attention", "full_attention"], linear_num_key_heads=1, linear_num_value_heads=1,
        linear_key_head_dim=8, linear_value_head_dim=8, head_dim=8, pad_token_id=13, eos_token_id=12,
    )  # fmt: skip
    save_tiny(tmp_path, tied=True)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    names = ("config.json", "tokenizer.json", "tokenizer_config.json")
    files = {n: (tmp_path / n).read_bytes() for n in names}
    with pytest.raises(UserError, match="linear_attention"):
        engine(Weights(Manifest(PolicyId(1, 0)), weight_tensors(model), files))


@pytest.mark.parametrize("free_memory", [False, True])
def test_responses_go_on_after_a_sleep_as_if_there_had_been_none(assets, free_memory):
    loaded = weights(assets, 3)
    requests = [request(i) for i in range(9)]
    straight = run(engine(loaded, max_rows=4), requests)
    made = engine(loaded, max_rows=4)
    for r in requests:
        made.submit(r)
    done: dict[int, Response] = {}
    while made.in_flight:
        done |= {r.id: r for r in made.step()}
        made.sleep(free_memory=free_memory)
        made.wake()
    assert {i: r.tokens for i, r in done.items()} == {i: r.tokens for i, r in straight.items()}
