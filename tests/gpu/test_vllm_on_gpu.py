"""The real vLLM on one GPU: its probabilities, and weights that come through a store while it generates.

bfloat16 differs from float32 by more than any bound worth testing, so each comparison is with how far transformers'
bfloat16 is from transformers' float32 on the same tokens.
"""

import threading
import time

import pytest
import torch
from bench.gpu.weights import in_memory_snapshot, load, staged

from tba.contracts.config import Engine, LoRA, Model
from tba.contracts.keys import WeightsKey, new_nonce
from tba.contracts.records import SnapshotManifest
from tba.lora import attach, merged, scale_of
from tba.models import build_model, load_weights
from tba.searcher.engines import Request, build
from tba.snapshots import Snapshot, SnapshotFetcher, publish_snapshot
from tba.snapshots.hostmemory import host_memory
from tba.store import open_store

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]  # warnings are vLLM's
MAX_MODEL_LEN, MAX_TOKENS = 512, 64
SHORT = "The capital of France is"


@pytest.fixture(scope="module")
def source(model_folder):
    return load(model_folder, max_model_len=MAX_MODEL_LEN, dtype="bfloat16")


@pytest.fixture(scope="module")
def first(source):
    return in_memory_snapshot(staged(source.model), source.assets, 0)


@pytest.fixture(scope="module")
def second(source):
    """Other weights: each matrix scaled by its own factor near 1, so that probabilities clearly differ."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: tensor * (1 + 0.1 * torch.randn(1, generator=generator).item()) if tensor.dim() > 1 else tensor
        for name, tensor in staged(source.model).items()
    }
    return in_memory_snapshot(tensors, source.assets, 1)


@pytest.fixture(scope="module")
def engine(first):
    settings = Engine(type="vllm", max_num_seqs=64, gpu_memory_utilization=0.3, extra_args={"logprobsShare": 1.0})
    made = build(settings, model=Model(uri="file:///m", dtype="bfloat16", max_model_len=MAX_MODEL_LEN))
    made.load(first)
    yield made
    made.close()


@pytest.fixture
def registering():
    """A thread that asks for new host memory all the time, as fetching ever larger snapshots does."""
    ended = threading.Event()

    def ask():
        size = 2**20
        while not ended.wait(0.01):  # without a break it would have the interpreter, or the lock, to itself
            host_memory(size)
            size = 2**28 + 2**20 - size  # of another number of blocks than before

    thread = threading.Thread(target=ask)
    thread.start()
    yield
    ended.set()
    thread.join()


@pytest.fixture(autouse=True)
def _clean(request):
    if "engine" in request.fixturenames:
        request.getfixturevalue("engine").abort()
    yield


def prompts(source, count: int) -> list[list[int]]:
    texts = [f"Question {i}: what is {i} plus {2 * i + 3}? Think aloud." for i in range(count)]
    return [source.tokenizer(text)["input_ids"] for text in texts]


def ask(engine, tokens_of: list[list[int]], *, together: bool):
    """[(prompt, response)], all at once or one after the other."""
    found = []
    for number, tokens in enumerate(tokens_of):
        engine.submit(Request(number, tokens, MAX_TOKENS, 1.0, False, 2**61 + number))
        while not together and engine.in_flight:
            found += engine.step()
    while engine.in_flight:
        found += engine.step()
    assert all(r.error is None for r in found), [r.error for r in found if r.error]
    return [(tokens_of[r.id], r) for r in sorted(found, key=lambda r: r.id)]


@torch.no_grad()
def scores(snapshot, answered, dtype) -> torch.Tensor:
    """Log-probabilities of all response tokens under transformers with the snapshot's weights."""
    model, _ = build_model(snapshot.assets, dtype=dtype, device="cuda")
    load_weights(model, snapshot.tensors)
    rows = []
    for prompt, response in answered:
        ids = torch.tensor([[*prompt, *response.tokens]], device="cuda")
        logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        rows.append(logits.gather(1, ids[0, len(prompt) :, None])[:, 0])
    return torch.cat(rows).cpu()


def distances(snapshot, answered) -> tuple[float, float]:
    """Mean |difference| to transformers in float32: of the engine, and of transformers in bfloat16."""
    exact = scores(snapshot, answered, torch.float32)
    rounded = scores(snapshot, answered, torch.bfloat16)
    engine = torch.tensor([x for _, r in answered for x in r.logprobs])
    assert len(engine) == len(exact)
    return (engine - exact).abs().mean().item(), (rounded - exact).abs().mean().item()


def test_probabilities_are_as_near_float32_as_those_of_transformers(engine, source, first):
    answered = ask(engine, prompts(source, 48), together=True)
    ours, theirs = distances(first, answered)
    print(f"engine {ours:.4f}, transformers bfloat16 {theirs:.4f} nats a token")
    assert ours <= 2 * theirs


def test_a_short_prompt_that_is_alone_has_right_probabilities_too(engine, source, first):
    """CUDA graphs of small prefills were once silently wrong (reference/vllm_gpu.md)."""
    alone = [source.tokenizer(SHORT)["input_ids"]] * 8 + [source.tokenizer("Hi")["input_ids"]] * 8
    answered = ask(engine, alone, together=False)
    ours, theirs = distances(first, answered)
    print(f"engine {ours:.4f}, transformers bfloat16 {theirs:.4f} nats a token")
    assert ours <= 2 * theirs


def test_weights_published_to_a_store_are_those_the_engine_generates_with(engine, source, first, second, tmp_path):
    store = open_store(f"file://{tmp_path}/store")
    key = WeightsKey(1, 1, new_nonce())
    publish_snapshot(store, key, second.tensors, assets=second.assets, parent=None, evaluation=None)
    fetched = SnapshotFetcher()(store, key.path)
    assert all(tensor.is_pinned() for tensor in fetched.tensors.values() if tensor.numel())
    try:
        engine.load(fetched)
        answered = ask(engine, prompts(source, 32), together=True)
        ours, theirs = distances(second, answered)
        old, _ = distances(first, answered)
        print(f"new weights: {ours:.4f}, bound {2 * theirs:.4f}; old weights: {old:.4f}")
        assert ours <= 2 * theirs < old
    finally:
        engine.load(first)


def test_responses_in_flight_go_on_through_swaps_with_exact_spans(engine, source, first, second):
    engine.load(first)
    order = [in_memory_snapshot(s.tensors, s.assets, v) for v, s in ((5, second), (6, first))]
    wanted = prompts(source, 32)
    for number, tokens in enumerate(wanted):
        engine.submit(Request(number, tokens, MAX_TOKENS, 1.0, False, 7 + number))
    done, steps = [], 0
    while engine.in_flight:
        done += engine.step()
        steps += 1
        if steps in (12, 30):
            engine.load(order.pop(0))
    assert not order, "the swaps came too late"
    assert len(done) == len(wanted) and all(r.error is None for r in done)
    for response in done:
        assert sum(s.num_tokens for s in response.spans) == len(response.tokens) == len(response.logprobs)
        versions = [s.version for s in response.spans]
        assert versions == [v for v in (0, 5, 6) if v in versions], "policies in the order of their swaps, each once"
    assert any(len(r.spans) == 3 for r in done), "no response lived through both swaps"
    assert {r.spans[0].version for r in done} == {0}


def test_after_a_swap_there_and_back_probabilities_are_right_again(engine, source, first, second):
    engine.load(second)
    ask(engine, prompts(source, 8), together=True)  # leaves its prompts in the prefix cache
    engine.load(first)
    ours, theirs = distances(first, ask(engine, prompts(source, 32), together=True))
    assert ours <= 2 * theirs


def test_a_sleep_that_frees_memory_keeps_what_is_in_flight(source, first, second):
    """As a colocated searcher does it for its trainer (trainer.colocatedSearcher.freeMemory)."""
    settings = Engine(
        type="vllm", max_num_seqs=32, gpu_memory_utilization=0.2,
        extra_args={"logprobsShare": 1.0, "enable_sleep_mode": True},
    )  # fmt: skip
    made = build(settings, model=Model(uri="file:///m", dtype="bfloat16", max_model_len=MAX_MODEL_LEN))
    made.load(first)
    try:
        wanted = prompts(source, 32)
        for number, tokens in enumerate(wanted):
            made.submit(Request(number, tokens, MAX_TOKENS, 1.0, False, 11 + number))
        done = [r for _ in range(20) for r in made.step()]
        began = time.perf_counter()
        before = torch.cuda.mem_get_info()[0]
        made.sleep(free_memory=True)
        slept = time.perf_counter()
        free, total = torch.cuda.mem_get_info()
        made.wake()
        woken = time.perf_counter()
        print(f"freed {(free - before) / 2**30:.1f} GiB; sleep {slept - began:.3f} s, wake {woken - slept:.3f} s")
        assert free - before > 0.1 * total, "more than half of the engine's share"
        made.load(in_memory_snapshot(second.tensors, second.assets, 5))
        while made.in_flight:
            done += made.step()
        assert len(done) == len(wanted) and all(r.error is None for r in done)
        assert {tuple(s.version for s in r.spans) for r in done} <= {(0,), (0, 5)}
        assert any(len(r.spans) == 2 for r in done)
        ours, theirs = distances(second, ask(made, prompts(source, 24), together=True))
        assert ours <= 2 * theirs
    finally:
        made.close()


LORA = LoRA(
    rank=12,
    alpha=18.0,
    target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
)


def with_adapter(base: Snapshot, version: int) -> tuple[Snapshot, Snapshot]:
    """A random adapter beside its base as a searcher reads it, and the same merged in float32."""
    model, _ = build_model(base.assets, dtype=torch.float32, device="cpu")
    generator = torch.Generator().manual_seed(version)
    shapes = {name: tensor.shape for name, tensor in attach(model, LORA).tensors().items()}
    adapter = {name: 0.03 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    nonce = new_nonce()
    manifest = SnapshotManifest(
        epoch=1, version=version, nonce=nonce, files=[], tensors=[], encoding="adapter", base=base.key,
        base_hash="0" * 32, depth=1, scale=scale_of(LORA),
    )  # fmt: skip
    beside = Snapshot(WeightsKey(version, 1, nonce).path, manifest, base.tensors, base.assets, adapter)
    exact = {name: tensor.float() for name, tensor in base.tensors.items()}
    return beside, Snapshot(beside.key, manifest, merged(exact, adapter, scale=scale_of(LORA)), base.assets)


def test_adapters_beside_their_base_are_swapped_in_flight_and_answer_as_merged_in_float32(source, first):
    settings = Engine(type="vllm", max_num_seqs=32, gpu_memory_utilization=0.2, extra_args={"logprobsShare": 1.0})
    model = Model(uri="file:///m", dtype="bfloat16", max_model_len=MAX_MODEL_LEN, lora=LORA)
    made = build(settings, model=model)
    try:
        made.load(first)
        assert made.takes_adapters
        ours, theirs = distances(first, ask(made, prompts(source, 24), together=True))
        assert ours <= 2 * theirs, "version 0 is the base"
        for number, tokens in enumerate(prompts(source, 32)):
            made.submit(Request(number, tokens, MAX_TOKENS, 1.0, False, 13 + number))
        done = [r for _ in range(20) for r in made.step()]
        for version in (1, 2):
            beside, whole = with_adapter(first, version)
            began = time.perf_counter()
            made.load(beside)
            print(f"swap {time.perf_counter() - began:.3f} s")
            while made.in_flight:
                done += made.step()
            ours, theirs = distances(whole, answered := ask(made, prompts(source, 24), together=True))
            old, _ = distances(first, answered)
            print(f"adapter {version}: {ours:.4f}, bound {2 * theirs:.4f}; without it: {old:.4f}")
            assert ours <= 2 * theirs < old
        assert all(r.error is None for r in done) and any(len(r.spans) == 2 for r in done)
    finally:
        made.close()


def test_an_engine_starts_while_the_next_weights_arrive(first, registering):
    settings = Engine(type="vllm", max_num_seqs=64, gpu_memory_utilization=0.1)
    engine = build(settings, model=Model(uri="file:///m", dtype="bfloat16", max_model_len=MAX_MODEL_LEN))
    engine.load(first)  # captures its graphs
    engine.close()
