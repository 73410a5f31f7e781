"""The real vLLM on a CPU. Importing it takes 12 s and more, so one engine serves most tests of this file."""

import copy
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from support.engines import (
    PROMPTS,
    Manifest,
    Weights,
    full_logprobs,
    model_of,
    request,
    response_logprobs,
    run,
)
from support.vllm_models import CHARACTERS, EOS, assets_of, save_small, small_weights

from tba import failpoints
from tba.contracts import config
from tba.contracts.config import LoRA
from tba.contracts.errors import CorruptObject, UserError
from tba.contracts.records import FinishReason, PolicyId, Span
from tba.lora import attach, merged
from tba.searcher.engines import build
from tba.searcher.engines.engine import Response

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # vLLM's
    pytest.mark.timeout(600),
]
ROWS, MAX_LEN = 16, 512


def make(*, tensor_parallel_size: int = 1, **extra):
    engine = config.Engine(
        type="vllm",
        max_num_seqs=ROWS,
        tensor_parallel_size=tensor_parallel_size,
        extra_args={"kv_cache_memory_bytes": 2**26, **extra},
    )
    return build(engine, model=config.Model(uri="file:///m", dtype="float32", max_model_len=MAX_LEN))


@pytest.fixture(scope="module")
def assets(tmp_path_factory) -> dict[bool, dict[str, bytes]]:
    """By whether the embeddings are tied."""
    return {tied: assets_of(save_small(tmp_path_factory.mktemp("small"), tied=tied)) for tied in (True, False)}


@pytest.fixture(scope="module")
def engines():
    """Engines by name, kept until the last test: the end of one would end what vLLM shares among them."""
    made = {}

    def get(name: object, **extra):
        if name not in made:
            made[name] = make(**({"logprobsShare": 1.0, "requestSeeds": True} | extra))
        return made[name]

    yield get
    for one in made.values():
        one.close()


@pytest.fixture
def loaded(assets, engines):
    """(engine, its weights) with tied embeddings and nothing in flight."""
    made, weights = engines(True), small_weights(assets[True], 1)
    made.abort()
    made.load(weights)
    yield made, weights
    failpoints.configure("")
    made.abort()


def sockets(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_socket()]


@pytest.mark.parametrize("tied", [True, False])
def test_recorded_logprobs_are_those_of_transformers_also_after_swaps(assets, engines, tied):
    made = engines(tied)
    for seed in (1, 2, 3):
        weights = small_weights(assets[tied], seed)
        made.load(weights)
        requests = [request(i, temperature=0.7 if i % 2 else 1.0) for i in range(40)]  # more than decode together
        done = run(made, requests)
        for r in requests:
            expected = full_logprobs(weights, r.prompt_tokens, done[r.id].tokens, r.temperature)
            assert np.allclose(done[r.id].logprobs, expected, atol=1e-4)
        # A control: other weights are far away.
        other = full_logprobs(small_weights(assets[tied], 9), PROMPTS[0], done[0].tokens)
        assert np.abs(np.array(done[0].logprobs) - other.numpy()).mean() > 0.1


@torch.no_grad()
def test_an_adapter_merged_at_a_swap_answers_as_the_one_beside_its_base(loaded):
    made, base = loaded
    model = model_of(base)
    adapter = attach(model, LoRA(rank=4, alpha=8.0, target_modules=["q_proj", "v_proj", "down_proj"]))
    for tensor in adapter.tensors().values():
        tensor.normal_(std=0.1)
    made.load(Weights(Manifest(PolicyId(1, 2)), merged(base.tensors, adapter.tensors(), scale=2.0), base.assets))
    requests = [request(i) for i in range(3)]
    done = run(made, requests)
    for r in requests:
        tokens = done[r.id].tokens
        wanted = response_logprobs([(model, len(tokens))], r.prompt_tokens, tokens)
        assert np.allclose(done[r.id].logprobs, wanted, atol=1e-4)
        with adapter.off():  # a control
            without = response_logprobs([(model, len(tokens))], r.prompt_tokens, tokens)
        assert not np.allclose(wanted, without, atol=1e-2)


def test_sampled_frequencies_are_the_whole_distribution(loaded):
    made, weights = loaded
    with torch.no_grad():
        logits = model_of(weights)(torch.tensor([PROMPTS[0]])).logits[0, -1]
    expected = torch.softmax(logits / 2.0, -1).numpy()
    n = 4000
    done = run(made, [request(i, prompt=PROMPTS[0], max_tokens=1, temperature=2.0) for i in range(n)])
    counts = Counter(r.tokens[0] for r in done.values())
    found = np.array([counts[t] for t in range(len(expected))]) / n
    assert np.all(np.abs(found - expected) < 5 * np.sqrt(expected * (1 - expected) / n) + 1e-9)
    assert np.all(found[expected > 0.004] > 0)  # also the unlikely ones


def test_greedy_is_the_most_likely_token_and_has_no_logprobs(loaded):
    made, weights = loaded
    done = run(made, [request(i, greedy=True, max_tokens=12) for i in range(3)])
    model = model_of(weights)
    for i in range(3):
        ids = list(PROMPTS[i])
        with torch.no_grad():
            for token in done[i].tokens:
                assert int(model(torch.tensor([ids])).logits[0, -1].argmax()) == token
                ids.append(token)
        assert done[i].logprobs is None


def test_end_of_sequence_is_the_last_token_and_the_limit_has_none(loaded):
    made, _ = loaded
    done = run(made, [request(i, max_tokens=12) for i in range(64)])
    stopped = [r for r in done.values() if r.finish_reason is FinishReason.STOP]
    limited = [r for r in done.values() if r.finish_reason is FinishReason.LENGTH]
    assert stopped and limited
    assert all(r.tokens[-1] == EOS and EOS not in r.tokens[:-1] for r in stopped)
    assert all(len(r.tokens) == 12 and EOS not in r.tokens for r in limited)
    assert all(len(r.logprobs or []) == len(r.tokens) == sum(s.num_tokens for s in r.spans) for r in done.values())


def test_equal_seeds_give_equal_responses_in_any_company_and_others_differ(loaded):
    made, _ = loaded
    alone = [run(made, [request(0, prompt=PROMPTS[0], seed=s)])[0].tokens for s in (0, 5, 2**63 - 1)]
    seeds = [*range(20, 40), 0, 5, 2**63 - 1]
    crowd = run(made, [request(i, prompt=PROMPTS[0], seed=s) for i, s in enumerate(seeds)])
    assert [crowd[i].tokens for i in (20, 21, 22)] == alone
    assert len({tuple(r.tokens) for r in crowd.values()}) > 20


def test_two_swaps_in_one_response_give_three_spans_and_the_logprobs_of_each(assets, loaded):
    made, first = loaded
    second, third = small_weights(assets[True], 2), small_weights(assets[True], 3)
    finished = []
    step = made._engine.step
    made._engine.step = lambda: [finished.append(o) or o for o in step()]
    for i in range(12):
        made.submit(request(i, prompt=PROMPTS[1]))
    done: list[Response] = []
    try:
        for weights in (None, second, third):
            if weights is not None:
                made.load(weights)
            for _ in range(4):
                done += made.step()
        while made.in_flight:
            done += made.step()
    finally:
        made._engine.step = step
    models = [model_of(weights) for weights in (first, second, third)]
    long = [r for r in done if len(r.tokens) > 8]
    assert len(long) > 3
    for r in long:
        counts = [s.num_tokens for s in r.spans]
        assert [(s.epoch, s.version) for s in r.spans] == [(1, 1), (1, 2), (1, 3)] and counts[:2] == [4, 4]
        parts = list(zip(models, counts, strict=True))
        assert np.allclose(r.logprobs, response_logprobs(parts, PROMPTS[1], r.tokens), atol=1e-4)
    if made._features.counts_versions:  # vLLM's own account of the same
        theirs = {int(o.request_id): o.outputs[0].weight_versions for o in finished if o.finished}
        for r in done:
            said = [(v.version, v.end - v.start) for v in theirs[r.id]]
            assert said == [(f"{s.epoch}:{s.version}", s.num_tokens) for s in r.spans]


def test_after_a_swap_new_requests_are_those_of_a_fresh_engine_while_others_hold_the_cache(assets, engines, loaded):
    made, _ = loaded
    prompt = (PROMPTS[2] * 40)[:300]  # more than two blocks of the prefix cache
    run(made, [request(0, prompt=prompt, max_tokens=4)])
    made.submit(request(99, prompt=prompt, max_tokens=200, seed=3))
    for _ in range(3):
        made.step()
    second = small_weights(assets[True], 2)
    made.load(second)
    wanted = [request(i, prompt=prompt, max_tokens=16, greedy=i == 0) for i in range(4)]
    done = run(made, wanted)
    fresh = engines("fresh")
    fresh.load(second)
    expected = run(fresh, wanted)
    for i in range(4):
        assert done[i].tokens == expected[i].tokens and done[i].spans == [Span(len(done[i].tokens), 1, 2)]
        if i:
            assert np.allclose(done[i].logprobs, full_logprobs(second, prompt, done[i].tokens), atol=1e-4)


def test_requests_that_had_not_begun_are_the_new_policys_alone(assets, loaded):
    made, _ = loaded
    prompt = (PROMPTS[0] * 60)[:290]
    first = [request(i, prompt=prompt, max_tokens=30) for i in range(ROWS)]
    waiting = [request(100 + i, prompt=prompt) for i in range(4)]
    for r in [*first, *waiting]:
        made.submit(r)
    made.step()
    second = small_weights(assets[True], 2)
    made.load(second)
    assert made.in_flight == ROWS + 4
    done = run(made)
    for r in waiting:
        response = done[r.id]
        assert response.spans == [Span(len(response.tokens), 1, 2)]
        assert np.allclose(response.logprobs, full_logprobs(second, prompt, response.tokens), atol=1e-4)


def test_a_long_response_holds_nobody_back(loaded):
    made, _ = loaded
    made.submit(request(0, max_tokens=400, seed=1, stop=()))
    order, next_id = [], 1
    while len(order) < 60 and made.in_flight:
        while made.in_flight < made.capacity:
            made.submit(request(next_id, max_tokens=3))
            next_id += 1
        order += [r.id for r in made.step()]
    assert order.index(0) > 20 if 0 in order else len(order) >= 60
    assert made.capacity == ROWS + 2


def test_a_stop_string_ends_a_response_and_is_kept(loaded):
    made, _ = loaded
    plain = run(made, [request(i, prompt=PROMPTS[0]) for i in range(30)])
    texts = {i: made.decode(r.tokens) for i, r in plain.items()}
    pair = Counter(t[j : j + 2] for t in texts.values() for j in range(len(t) - 1)).most_common(1)[0][0]
    done = run(made, [request(i, prompt=PROMPTS[0], stop=[pair]) for i in range(30)])
    assert any(pair in t for t in texts.values())
    for i, text in texts.items():
        cut = text[: text.index(pair) + 2] if pair in text else text
        assert made.decode(done[i].tokens) == cut
        assert done[i].tokens == plain[i].tokens[: len(done[i].tokens)]
        assert done[i].finish_reason is (FinishReason.STOP if pair in text else plain[i].finish_reason)
        assert len(done[i].logprobs or []) == len(done[i].tokens) == sum(s.num_tokens for s in done[i].spans)


def test_requests_that_cannot_be_answered_are_errors_of_their_own(loaded):
    made, _ = loaded
    bad = [
        request(0, prompt=[1] * (MAX_LEN - 4), max_tokens=5),
        request(1, prompt=[]),
        request(2, temperature=0.001),
        request(3, prompt=[len(CHARACTERS) + 400]),
    ]
    done = run(made, [*bad, request(4), request(5, prompt=[1] * (MAX_LEN - 4), max_tokens=4)])
    assert f"{MAX_LEN - 4} prompt tokens and 5 for the response do not fit maxModelLen {MAX_LEN}" in done[0].error
    assert "maxModelLen" in done[1].error and "temperature" in done[2].error and "vLLM refused" in done[3].error
    for i in range(4):
        assert done[i].tokens == [] and done[i].spans == [Span(0, 1, 1)] and done[i].logprobs is None
    assert done[4].error is None and done[4].tokens and len(done[5].tokens) <= 4 and done[5].error is None


def test_weights_that_do_not_fit_are_refused_and_the_old_ones_serve_on(assets, loaded):
    made, weights = loaded
    expected = run(made, [request(0, greedy=True), request(1)])
    wrong_shape, wrong_name, missing = (copy.copy(small_weights(assets[True], 2)) for _ in range(3))
    name = sorted(wrong_shape.tensors)[3]
    wrong_shape.tensors[name] = wrong_shape.tensors[name].T.contiguous()[:-1]
    wrong_name.tensors["model.other.weight"] = wrong_name.tensors.pop(name)
    del missing.tensors[name]
    made.submit(request(1))
    made.step()
    for bad in (wrong_shape, wrong_name, missing):
        with pytest.raises(CorruptObject, match=name):
            made.load(bad)
    done = run(made, [request(0, greedy=True)])
    assert done[0].tokens == expected[0].tokens and done[1].tokens == expected[1].tokens
    assert done[1].spans == [Span(len(done[1].tokens), 1, 1)]
    assert np.allclose(done[1].logprobs, full_logprobs(weights, PROMPTS[1], done[1].tokens), atol=1e-4)


@pytest.mark.parametrize("tied", [True, False])
def test_an_update_that_breaks_between_two_tensors_leaves_the_old_weights(assets, engines, tied):
    made, old, new = engines(tied), small_weights(assets[tied], 1), small_weights(assets[tied], 2)
    made.load(old)
    expected = run(made, [request(i) for i in range(3)])
    for nth in (1, 3, 9, len(new.tensors)):
        made.submit(request(50, seed=8))
        made.step()
        failpoints.configure(f"engine.between_tensors=raise:{nth}")
        with pytest.raises(CorruptObject, match="old weights serve on"):
            made.load(new)
        done = run(made, [request(i) for i in range(3)])
        for i in range(3):
            assert done[i].tokens == expected[i].tokens and done[i].spans == [Span(len(done[i].tokens), 1, 1)]
            assert np.allclose(done[i].logprobs, expected[i].logprobs, atol=1e-5)
        assert np.allclose(done[50].logprobs, full_logprobs(old, PROMPTS[2], done[50].tokens), atol=1e-4)
    made.load(new)
    done = run(made, [request(0)])
    assert np.allclose(done[0].logprobs, full_logprobs(new, PROMPTS[0], done[0].tokens), atol=1e-4)


@pytest.mark.parametrize("drops_cache", [False, True])
def test_responses_go_on_after_a_sleep_as_if_there_had_been_none(loaded, monkeypatch, drops_cache):
    made, _ = loaded
    # vLLM refuses its sleep mode on a CPU, where memory would stay; what it does to requests is the same.
    monkeypatch.setattr(made, "_sleeps", drops_cache)
    requests = [request(i, prompt=PROMPTS[i % 3], seed=i) for i in range(ROWS)]
    straight = run(made, requests)
    for r in requests:
        made.submit(r)
    done: dict[int, Response] = {}
    while made.in_flight:
        before = made.in_flight
        made.sleep(free_memory=True)
        assert made.in_flight == before
        made.wake()
        done |= {r.id: r for _ in range(5) for r in made.step()}
    assert {i: r.tokens for i, r in done.items()} == {i: r.tokens for i, r in straight.items()}


def test_weights_that_change_after_a_sleep_begin_their_span_there(assets, loaded, monkeypatch):
    made, _ = loaded
    monkeypatch.setattr(made, "_sleeps", True)
    made.submit(request(0, max_tokens=20, prompt=[0, 7, 10, 4]))
    for _ in range(6):
        made.step()
    made.sleep(free_memory=True)
    made.wake()
    made.load(small_weights(assets[True], 2))
    response = run(made)[0]
    assert [s.version for s in response.spans] == [1, 2]
    assert sum(s.num_tokens for s in response.spans) == len(response.tokens)


def test_prompts_enter_together_and_all_are_answered_as_if_they_had_not(assets, engines, loaded):
    alone, weights = loaded
    requests = [request(i, greedy=True) for i in range(3 * ROWS)]
    expected = {i: r.tokens for i, r in run(alone, requests).items()}
    made = engines("together", admittedAtOnce=ROWS)
    made.load(weights)
    assert {i: r.tokens for i, r in run(made, requests).items()} == expected


def test_prompts_longer_than_a_step_takes_are_answered(assets, engines):
    made = engines("short steps", requestSeeds=None, max_num_batched_tokens=MAX_LEN)
    made.load(small_weights(assets[True], 1))
    requests = [request(i, prompt=[1 + (i + j) % 9 for j in range(200)], max_tokens=8) for i in range(ROWS)]
    assert all(r.error is None for r in run(made, requests).values())


def test_abort_forgets_everything_and_the_engine_goes_on(loaded):
    made, _ = loaded
    for i in range(30):
        made.submit(request(i))
    made.submit(request(30, prompt=[]))
    made.step()
    made.abort()
    assert made.in_flight == 0 and made.step() == []
    assert set(run(made, [request(7)])) == {7}


def test_only_the_wanted_share_of_responses_has_logprobs(assets, engines):
    made = engines("half", logprobsShare=0.5)
    made.load(small_weights(assets[True], 1))
    done = run(made, [request(i, seed=i * 2**58) for i in range(32)])
    assert [done[i].logprobs is not None for i in range(32)] == [i < 16 for i in range(32)]


def test_before_its_first_weights_an_engine_wants_nothing_and_checks_its_settings(assets):
    made = make()
    assert made.capacity == 0 and made.in_flight == 0 and made.step() == []
    with pytest.raises(RuntimeError, match="load a snapshot"):
        made.submit(request(0))
    bad = small_weights(assets[True], 1)
    bad.tensors.popitem()
    with pytest.raises(CorruptObject, match="missing"):
        made.load(bad)
    with pytest.raises(UserError, match="did you mean max_num_batched_tokens"):
        make(max_num_batch_tokens=3)
    with pytest.raises(UserError, match="vLLM refuses"):
        make(block_size="many").load(small_weights(assets[True], 1))


@pytest.fixture
def temporary(monkeypatch):
    """The temporary directory of the test, with a short name: the path of a socket has 107 bytes."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


# The last: it ends what all engines share.
def test_worker_processes_take_every_version_from_shared_memory_and_leave_no_socket(assets, temporary):
    made = make(tensor_parallel_size=2, logprobsShare=1.0)
    try:
        for seed in (1, 2, 3):
            weights = small_weights(assets[True], seed)
            made.load(weights)
            done = run(made, [request(i) for i in range(6)])
            for i in range(6):
                expected = full_logprobs(weights, PROMPTS[i % 3], done[i].tokens)
                assert np.allclose(done[i].logprobs, expected, atol=1e-4)
        assert {path.parent for path in sockets(temporary)} == {made._folder.path}
    finally:
        made.close()
    assert sockets(temporary) == [] and list(temporary.glob("tba-engine-*")) == []
