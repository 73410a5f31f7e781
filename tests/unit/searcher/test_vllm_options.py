import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tba.contracts import config
from tba.contracts.errors import UserError
from tba.contracts.records import PolicyId, Span
from tba.searcher.engines import with_logprobs
from tba.searcher.engines.engine import Request
from tba.searcher.engines.vllm_options import (
    admissible,
    admitted_at_once,
    capture_sizes,
    environment,
    misfit,
    refusal,
    spans_of,
    vllm_options,
    waiting_requests,
    wants_logprobs,
)
from tba.searcher.engines.vllm_weights import SharedWeights

KNOWN = {"max_num_batched_tokens", "enable_prefix_caching", "enforce_eager", "kv_cache_memory_bytes", "quantization",
         "model", "max_num_seqs", "compilation_config", "watermark"}  # fmt: skip
MODEL = config.Model(uri="file:///m", dtype="float32", max_model_len=64)


def options(*, cpu=False, engine=None, **extra):
    settings = config.Engine(type="vllm", extra_args=extra, **(engine or {}))
    return vllm_options(settings, MODEL, known=KNOWN, cpu=cpu, seed=3)


def request(*, prompt=4, max_tokens=8, temperature=1.0, greedy=False) -> Request:
    return Request(0, list(range(prompt)), max_tokens, temperature, greedy, 1)


def test_fields_of_the_job_become_arguments_and_sampling_is_neutral():
    made = options(engine={"tensor_parallel_size": 2, "gpu_memory_utilization": 0.5, "max_num_seqs": 6}).engine_args
    assert made["dtype"] == "float32" and made["max_model_len"] == 64
    assert (made["tensor_parallel_size"], made["gpu_memory_utilization"], made["max_num_seqs"]) == (2, 0.5, 6)
    assert (made["generation_config"], made["logprobs_mode"]) == ("vllm", "processed_logprobs")
    assert made["compilation_config"] == {
        "mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 6]
    }  # fmt: skip


def test_a_cpu_runs_without_graphs_and_with_a_small_cache_unless_told():
    made = options(cpu=True).engine_args
    assert made["enforce_eager"] and made["kv_cache_memory_bytes"] == 2**30 and "compilation_config" not in made
    assert options(cpu=True, kv_cache_memory_bytes=5).engine_args["kv_cache_memory_bytes"] == 5


def test_extra_args_win_over_our_choices():
    assert options(compilation_config={"mode": 3}).engine_args["compilation_config"] == {"mode": 3}


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"model": "x"}, "has a field of its own: set model.uri"),
        ({"enable_lora": True}, "set model.lora"),
        ({"max_lora_rank": 16}, "set model.lora.rank"),
        ({"lora_target_modules": ["q_proj"]}, "set model.lora.targetModules"),
        ({"max_loras": 2}, "the one adapter there is comes from model.lora"),
        ({"mergeAdapter": "yes"}, "mergeAdapter must be true or false, got 'yes'"),
        ({"max_num_seqs": 1}, "set searcher.engine.maxNumSeqs"),
        ({"quantization": "fp8"}, "whole distribution of the published weights"),
        ({"generation_config": "auto"}, "is refused"),
        ({"pipeline_parallel_size": 2}, "add searchers to scale"),
        ({"speculative_config": {}}, "what a request's tokens are"),
        ({"max_batched_tokens": 1}, "did you mean max_num_batched_tokens"),
        ({"logprobShare": 1}, "did you mean logprobsShare"),
        ({"quantisation": 1}, "see EngineArgs"),
        ({"logprobsShare": 1.5}, "from 0 to 1, got 1.5"),
        ({"logprobsShare": True}, "from 0 to 1, got True"),
        ({"requestSeeds": 1}, "true or false, got 1"),
        ({"admittedAtOnce": 0}, "a whole number of sequences from 1, got 0"),
        ({"admittedAtOnce": True}, "from 1, got True"),
    ],
)
def test_arguments_that_are_unknown_or_not_theirs_to_set_are_refused(extra, message):
    with pytest.raises(UserError, match=re.escape(message)):
        options(**extra)


def test_our_own_arguments_do_not_reach_vllm():
    made = options(logprobsShare=1, requestSeeds=False, mergeAdapter=True)
    assert (made.logprobs_share, made.request_seeds, made.merge_adapter) == (1.0, False, True)
    assert not {"logprobsShare", "requestSeeds", "mergeAdapter"} & made.engine_args.keys()
    assert options().request_seeds is None and options().logprobs_share == 0.0 and not options().merge_adapter


def test_only_a_cpu_wants_its_threads_tamed():
    assert environment(cpu=True)["OMP_WAIT_POLICY"] == "PASSIVE"
    assert not any(name.startswith(("OMP", "TORCH")) for name in environment(cpu=False))


@given(st.integers(1, 5000))
def test_every_batch_has_a_graph_that_is_little_larger(max_num_seqs):
    sizes = capture_sizes(max_num_seqs)
    assert sizes == sorted(set(sizes)) and sizes[-1] == max_num_seqs
    for n in {1, 3, 5, 40, 130, 300, 900, 2000, max_num_seqs} & set(range(1, max_num_seqs + 1)):
        graph = next(s for s in sizes if s >= n)
        assert graph - n < max(8, n / 7)


@given(st.integers(1, 5000))
def test_some_requests_wait_and_they_are_few(max_num_seqs):
    assert 1 <= waiting_requests(max_num_seqs) <= max_num_seqs / 8 + 1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"prompt": 0}, "0 prompt tokens and 8 for the response do not fit maxModelLen 12"),
        ({"prompt": 5}, "5 prompt tokens and 8"),
        ({"max_tokens": 0}, "4 prompt tokens and 0"),
        ({"temperature": 0.001}, "temperature 0.01 or more, got 0.001"),
    ],
)
def test_requests_that_vllm_would_answer_otherwise_are_refused(wrong, message):
    assert message in (refusal(request(**wrong), 12) or "")


def test_a_request_that_just_fits_is_none_to_refuse():
    assert refusal(request(), 12) is None
    assert refusal(request(temperature=0.001, greedy=True), 12) is None


def test_the_share_of_requests_with_logprobs_follows_the_seed():
    seeds = [i * 2**63 // 1000 for i in range(1000)]
    assert sum(wants_logprobs(s, 0.25) for s in seeds) == 250
    assert not wants_logprobs(0, 0.0) and wants_logprobs(2**63 - 1, 1.0)


def test_spans_by_hand():
    a, b, c = PolicyId(1, 0), PolicyId(1, 1), PolicyId(2, 0)
    assert spans_of([(a, 0)], 5) == [Span(5, 1, 0)]
    assert spans_of([(a, 0), (b, 2), (c, 4)], 5) == [Span(2, 1, 0), Span(2, 1, 1), Span(1, 2, 0)]
    assert spans_of([(a, 0), (b, 3)], 3) == [Span(3, 1, 0)]  # it ended before the new weights made a token
    assert spans_of([(a, 0), (b, 2), (b, 4)], 5) == [Span(2, 1, 0), Span(3, 1, 1)]
    assert spans_of([(a, 0)], 0) == [Span(0, 1, 0)]


@given(st.lists(st.integers(0, 9), max_size=6), st.integers(1, 60))
def test_spans_cover_the_tokens_and_each_is_credited_to_who_was_last_to_take_over(steps, tail):
    starts = [(PolicyId(1, 0), 0)]
    for version, step in enumerate(steps, 1):
        starts.append((PolicyId(1, version), starts[-1][1] + step))
    total = starts[-1][1] + tail
    spans = spans_of(starts, total)
    made = [(s.epoch, s.version) for s in spans for _ in range(s.num_tokens)]
    assert made == [max(p for p, start in starts if start <= i) for i in range(total)]
    assert all((x.epoch, x.version) != (y.epoch, y.version) for x, y in zip(spans, spans[1:], strict=False))


def test_weights_are_compared_by_name_and_shape():
    assert misfit({"a": [2, 3]}, {"a": torch.Size([2, 3])}) is None
    assert misfit({"a": [2], "b": [1]}, {"a": [2], "c": [1]}) == (
        "weights do not fit the model: missing ['b'], foreign ['c']"
    )
    assert misfit({"a": [2, 3]}, {"a": [3, 2]}) == "weights do not fit: a is [3, 2], want [2, 3]"


def test_weights_in_shared_memory_are_those_that_were_put_there_and_it_stays_for_the_next():
    shared = SharedWeights()
    first = {"a": torch.randn(3, 5), "b": torch.randn(7).bfloat16(), "c": torch.tensor(2.0)}
    layout = shared.put(first)
    seen = layout.tensors()  # as a worker maps them
    assert all(torch.equal(seen[n], t) for n, t in first.items())
    second = {n: t + 1 for n, t in first.items()}
    assert shared.put(second) is layout
    assert all(torch.equal(seen[n], t) for n, t in second.items())
    other = shared.put({"a": torch.ones(2)})
    assert torch.equal(other.tensors()["a"], torch.ones(2))
    assert all(torch.equal(seen[n], t) for n, t in second.items()), "who maps it keeps it"
    shared.close()
    assert not Path(other.path).exists()


def test_workers_see_shared_weights_and_nothing_of_them_outlives_a_killed_engine():
    worker = "import sys, torch; print(torch.from_file(sys.argv[1], shared=True, size=1, dtype=torch.uint8).item())"
    engine = f"""
import os, signal, subprocess, sys, torch
from tba.searcher.engines.vllm_weights import SharedWeights
made = SharedWeights().put({{"a": torch.full((1,), 7, dtype=torch.uint8)}})
subprocess.run([sys.executable, "-c", {worker!r}, made.path], check=True)
print(made.path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    files = {folder: set(os.listdir(folder)) for folder in ("/dev/shm", tempfile.gettempdir())}
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3] / "workloads")}
    done = subprocess.run([sys.executable, "-c", engine], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr
    seen, path = done.stdout.split()
    assert seen == "7" and not Path(path).exists()
    assert not [name for folder, old in files.items() for name in set(os.listdir(folder)) - old if "weights" in name]


def test_vllm_is_imported_by_two_modules_only():
    root = Path(__file__).parents[3] / "workloads"
    found = {p.name for p in root.rglob("*.py") if re.search(r"^\s*(from|import) vllm\b", p.read_text(), re.MULTILINE)}
    assert found == {"vllm.py", "vllm_weights.py"}


def test_prompts_enter_together_only_where_admitting_costs_a_graph():
    assert admitted_at_once(512, wanted=None, only_decoding_has_graphs=True) == 64
    assert admitted_at_once(512, wanted=None, only_decoding_has_graphs=False) == 1
    assert admitted_at_once(4, wanted=None, only_decoding_has_graphs=True) == 1
    assert admitted_at_once(4, wanted=3, only_decoding_has_graphs=False) == 3
    assert admitted_at_once(4, wanted=9, only_decoding_has_graphs=False) == 4


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=60),
    places=st.integers(1, 12),
    at_once=st.integers(1, 12),
)
def test_held_requests_all_run_within_the_places_and_nothing_idles_with_at_once_places_free(lengths, places, at_once):
    at_once = min(at_once, places)
    held, running, done = list(lengths), [], 0
    while held or running:
        count = admissible(held=len(held), running=len(running), max_num_seqs=places, at_once=at_once)
        assert count == 0 or count >= min(at_once, len(held)) or not running
        running += held[:count]
        held = held[count:]
        assert 0 < len(running) <= places
        assert places - len(running) < at_once or not held
        running = [left - 1 for left in running if left > 1]
        done += 1
    assert done <= sum(lengths)


@pytest.mark.parametrize(
    ("parameters", "extra", "share"),
    [({}, {}, 0.0), ({"ratioAlpha": 0}, {}, 0.0), ({"ratioAlpha": 0.5}, {}, 1.0),
     ({"ratioAlpha": 0.5}, {"logprobsShare": 0.1}, 0.1)],
)  # fmt: skip
def test_every_response_carries_log_probs_where_rows_are_weighed_by_them(parameters, extra, share):
    engine = config.Engine.model_validate({"type": "vllm", "extraArgs": extra})
    told = with_logprobs(engine, config.Objective(parameters=parameters))
    model = config.Model(uri="file:///m", max_model_len=64)
    found = vllm_options(told, model, known=KNOWN, cpu=True, seed=0)
    assert found.logprobs_share == share
    other = config.Engine.model_validate({"type": "transformers"})
    assert with_logprobs(other, config.Objective(parameters={"ratioAlpha": 1.0})) == other
