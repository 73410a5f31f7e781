"""Adapters beside their base in the real vLLM on a CPU."""

import numpy as np
import pytest
import structlog
import torch
from support.engines import PROMPTS, Manifest, Weights, full_logprobs, model_of, request, response_logprobs, run
from support.vllm_models import CHARACTERS, EOS, PAD, assets_of, save_small, small_weights
from transformers import AutoModelForCausalLM, BloomConfig

from tba import failpoints
from tba.contracts import config
from tba.contracts.config import LoRA
from tba.contracts.errors import CorruptObject
from tba.contracts.records import PolicyId, Span
from tba.lora import attach, scale_of
from tba.models import weight_tensors
from tba.searcher.engines import build
from tba.searcher.engines.engine import Response

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # vLLM's
    pytest.mark.timeout(600),
]
LORA = LoRA(rank=5, alpha=7.0, target_modules=["q_proj", "v_proj", "gate_proj", "down_proj"])
"""No rank of vLLM's, no power of two as a scale, and parts of what it packs."""


def make(lora: LoRA = LORA, *, tensor_parallel_size: int = 1, dtype="float32", **extra):
    engine = config.Engine(
        type="vllm",
        max_num_seqs=16,
        tensor_parallel_size=tensor_parallel_size,
        extra_args={"kv_cache_memory_bytes": 2**26, "logprobsShare": 1.0, "requestSeeds": True, **extra},
    )
    return build(engine, model=config.Model(uri="file:///m", dtype=dtype, max_model_len=512, lora=lora))


@pytest.fixture(scope="module")
def bases(tmp_path_factory) -> dict[bool, Weights]:
    """Version 0 by whether its embeddings are tied."""
    made = {}
    for tied in (True, False):
        assets = assets_of(save_small(tmp_path_factory.mktemp("small"), tied=tied))
        tensors = small_weights(assets, 1).tensors
        made[tied] = Weights(Manifest(PolicyId(1, 0)), tensors, assets, "weights/0/manifest.json")
    return made


@pytest.fixture
def base(bases) -> Weights:
    return bases[True]


@pytest.fixture(scope="module")
def engines():
    """Engines by name, kept until the last test: the end of one would end what vLLM shares among them."""
    made = {}

    def get(name: object, *arguments, **extra):
        if name not in made:
            made[name] = make(*arguments, **extra)
        return made[name]

    yield get
    for one in made.values():
        one.close()


@pytest.fixture
def loaded(base, engines):
    """The engine with version 0 and nothing in flight."""
    made = engines(True)
    made.abort()
    made.load(base)
    yield made
    failpoints.configure("")
    made.abort()


def adapted(base: Weights, version: int, lora: LoRA = LORA):
    """(snapshot of this version, the model of transformers with its adapter on)."""
    model = model_of(base)
    adapter = attach(model, lora)
    torch.manual_seed(version)
    with torch.no_grad():
        for tensor in adapter.tensors().values():
            tensor.normal_(std=0.15)
    manifest = Manifest(PolicyId(1, version), base.key, scale_of(lora))
    tensors = {name: tensor.clone() for name, tensor in adapter.tensors().items()}
    return Weights(manifest, base.tensors, base.assets, f"weights/{version}/manifest.json", tensors), model


def agrees(model, response: Response) -> None:
    expected = response_logprobs([(model, len(response.tokens))], PROMPTS[response.id % 3], response.tokens)
    assert np.allclose(response.logprobs, expected, atol=1e-4)


@pytest.mark.parametrize("tied", [True, False])
def test_logprobs_are_those_of_the_adapter_beside_its_base_after_every_swap(bases, engines, tied):
    made, base = engines(tied), bases[tied]
    made.load(base)
    requests = [request(i) for i in range(20)]
    for version in (1, 2, 3):
        snapshot, model = adapted(base, version)
        made.load(snapshot)
        done = run(made, requests)
        for response in done.values():
            agrees(model, response)
            assert response.spans == [Span(len(response.tokens), 1, version)]
        # A control: without the adapter they are far away.
        other = full_logprobs(base, PROMPTS[0], done[0].tokens)
        assert np.abs(np.array(done[0].logprobs) - other.numpy()).mean() > 0.05
    assert made.takes_adapters


def test_version_0_is_the_base_also_after_an_adapter(base, loaded):
    model = model_of(base)
    first = run(loaded, [request(i) for i in range(6)])
    loaded.load(adapted(base, 1)[0])
    loaded.load(base)
    again = run(loaded, [request(i) for i in range(6)])
    for i in range(6):
        assert first[i].tokens == again[i].tokens and first[i].logprobs == again[i].logprobs
        agrees(model, first[i])


def test_two_adapters_in_one_response_give_three_spans_and_the_logprobs_of_each(base, loaded):
    second, third = adapted(base, 1), adapted(base, 2)
    for i in range(12):
        loaded.submit(request(3 * i))
    done: list[Response] = []
    for snapshot in (None, second[0], third[0]):
        if snapshot is not None:
            loaded.load(snapshot)
        for _ in range(4):
            done += loaded.step()
    done += run(loaded).values()
    long = [r for r in done if len(r.tokens) > 8]
    assert len(long) > 3
    for r in long:
        counts = [s.num_tokens for s in r.spans]
        assert [(s.epoch, s.version) for s in r.spans] == [(1, 0), (1, 1), (1, 2)] and counts[:2] == [4, 4]
        parts = list(zip((model_of(base), second[1], third[1]), counts, strict=True))
        assert np.allclose(r.logprobs, response_logprobs(parts, PROMPTS[0], r.tokens), atol=1e-4)


def test_only_the_adapter_goes_in_where_the_base_is_the_same(base, loaded):
    failpoints.configure("engine.between_tensors=raise:1")  # in the first tensor of a base
    loaded.load(adapted(base, 1)[0])
    assert {s.version for r in run(loaded, [request(0)]).values() for s in r.spans} == {1}


def test_another_base_comes_with_its_adapter(base, loaded):
    other = small_weights(base.assets, 5)
    other = Weights(Manifest(PolicyId(2, 0)), other.tensors, base.assets, "weights/other/manifest.json")
    for weights in (other, base):
        snapshot, model = adapted(weights, 4)
        loaded.load(snapshot)
        for response in run(loaded, [request(i) for i in range(6)]).values():
            agrees(model, response)


@pytest.mark.parametrize("broken", ["shape", "half", "stranger", "vllm"])
def test_an_adapter_that_is_refused_leaves_the_old_one_serving(base, loaded, broken):
    old, model = adapted(base, 1)
    loaded.load(old)
    expected = run(loaded, [request(i) for i in range(3)])
    bad = adapted(base, 2)[0]
    name = sorted(bad.adapter)[0]
    if broken == "shape":
        bad.adapter[name] = bad.adapter[name][:2]
    elif broken == "half":
        del bad.adapter[name]
    elif broken == "stranger":
        bad.adapter["model.other.lora_A.weight"] = bad.adapter[name]
    else:
        failpoints.configure("engine.before_adapter=raise:1")
    loaded.submit(request(50))
    loaded.step()
    with pytest.raises(CorruptObject, match="old weights serve on" if broken == "vllm" else "do not fit|lora_A"):
        loaded.load(bad)
    done = run(loaded, [request(i) for i in range(3)])
    for i in (0, 1, 2, 50):
        agrees(model, done[i])
        assert done[i].spans == [Span(len(done[i].tokens), 1, 1)]
    assert all(done[i].tokens == expected[i].tokens for i in range(3))
    good, model = adapted(base, 2)
    loaded.load(good)
    agrees(model, run(loaded, [request(0)])[0])


def told(made, snapshot) -> str:
    """What the log says of the adapter when the engine starts."""
    with structlog.testing.capture_logs() as logs:
        made.load(snapshot)
    return next(line["adapter"] for line in logs if line["event"] == "model_loaded")


def test_a_searcher_that_joins_late_begins_with_an_adapter_and_answers_greedily_as_a_merging_one(base, engines):
    late, merging = engines("late"), engines("merging", mergeAdapter=True)
    snapshot, model = adapted(base, 3)
    assert told(late, snapshot) == "beside its base" and late.takes_adapters
    assert "mergeAdapter asks for it" in told(merging, snapshot) and not merging.takes_adapters
    requests = [request(i, greedy=True) for i in range(9)]
    found = [run(made, requests) for made in (late, merging)]
    assert all(found[0][i].tokens == found[1][i].tokens for i in range(9))
    agrees(model, run(merging, [request(0)])[0])


def test_where_vllm_does_not_take_an_adapter_it_is_merged_and_the_log_says_why(base, engines):
    made = engines("refuses")
    assert made.takes_adapters
    failpoints.configure("engine.before_adapter=raise:1")
    note = told(made, adapted(base, 1)[0])
    failpoints.configure("")
    assert note.startswith("merged: vLLM did not take it") and not made.takes_adapters
    for version in (2, 3):  # one that was fetched before the engine had found out, and one that comes merged
        snapshot, model = adapted(base, version)
        made.load(snapshot if version == 2 else snapshot.merged())
        for response in run(made, [request(i) for i in range(6)]).values():
            agrees(model, response)
            assert response.spans == [Span(len(response.tokens), 1, version)]


def test_a_model_that_has_no_adapters_in_vllm_gets_them_merged(tmp_path, engines):
    torch.manual_seed(0)
    save_small(tmp_path, tied=True)
    vocabulary = len(CHARACTERS) + 2
    shape = BloomConfig(
        vocab_size=vocabulary,
        hidden_size=128,
        n_layer=2,
        n_head=4,
        eos_token_id=EOS,
        bos_token_id=None,
        pad_token_id=PAD,
    )
    model = AutoModelForCausalLM.from_config(shape)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1) if parameter.dim() > 1 else parameter.fill_(0.1)
    shape.architectures = ["BloomForCausalLM"]
    shape.save_pretrained(tmp_path)
    base = Weights(Manifest(PolicyId(1, 0)), dict(weight_tensors(model)), assets_of(tmp_path), "weights/bloom")
    lora = LoRA(rank=4, target_modules=["query_key_value"])
    snapshot, beside = adapted(base, 1, lora)
    made = engines("bloom", lora)
    assert "vLLM has no adapters for this model" in told(made, snapshot)
    for response in run(made, [request(i) for i in range(6)]).values():
        agrees(beside, response)


def test_worker_processes_have_the_adapter_too(base):  # the last: it ends what all engines share
    made = make(tensor_parallel_size=2)
    try:
        made.load(base)
        for version in (1, 2):
            snapshot, model = adapted(base, version)
            made.load(snapshot)
            for response in run(made, [request(i) for i in range(6)]).values():
                agrees(model, response)
        assert made.takes_adapters
    finally:
        made.close()
