"""What the arms of bench_count.py have in common, and how each is put together."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from bench.gpu.arm_async import async_scheduling
from bench.gpu.bench_count import TASKS, job_settings
from bench.gpu.count_arms import RUNNERS, at_steps
from bench.gpu.count_runs import ARMS, SHARED
from bench.gpu.places import JOB, flags
from bench.gpu.trl_server import arguments
from bench.gpu.varlen import flash_attn_varlen_func

from tba.cli.jobfile import load_job


def with_paths() -> dict[str, str]:
    """This process's environment, and its import path."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def job(arm: int, task: str = "count", *settings: str):
    """The job that an arm runs."""
    options = argparse.Namespace(
        start=Path("start"), task=task, max_steps=7, settings=list(settings), searchers=(3, 64)
    )
    return load_job(JOB, job_settings(options, arm, 3)).spec


@pytest.mark.parametrize("task", sorted(TASKS))
def test_every_arm_has_the_same_start_prompts_limits_batch_and_rate(task):
    assert set(RUNNERS) == set(ARMS)
    for arm in ARMS:
        one, first = job(arm, task), job(1, task)
        assert (one.model, one.task) == (first.model, first.task), ARMS[arm]
        same = ("prompts_per_batch", "responses_per_prompt", "learning_rate", "optimizer", "schedule", "total_steps")
        assert [getattr(one.objective, n) for n in same] == [getattr(first.objective, n) for n in same], ARMS[arm]
        assert one.searcher.engine.max_num_seqs == (64 if arm == SHARED else 512) and one.objective.seed == 3


def test_what_the_user_sets_wins_over_what_an_arm_needs():
    assert job(8).objective.parameters == {"ratioAlpha": 1.0, "ratioClip": 3.0}
    assert job(8, "count", "objective.parameters.ratioClip=2.0").objective.parameters["ratioClip"] == 2.0
    assert job(SHARED).searcher.replicas == 3
    assert job(2).objective.parameters == {"baselineShift": 0.1, "ratioAlpha": 0}
    assert job(SHARED, "count", "objective.parameters.ratioAlpha=1").objective.parameters["ratioAlpha"] == 1
    assert job(6).trainer.colocated_searcher.enabled and job(7).searcher.replicas == 3


def test_rewards_wait_in_count_slow_alone():
    assert job(1, "count-slow").task.reward.parameters == {"seconds": 0.2}
    assert job(1).task.reward.name == "gsm8k" and job(1).task.sampling == job(1, "count-slow").task.sampling


def test_weights_kept_at_a_step_are_scored_at_the_time_that_it_ended():
    steps = [[2.0, 0.1], [3.0, 0.2], [7.0, 0.3]]
    assert at_steps(steps, {2: 0.5, 0: 0.3, 4: 0.9}) == [(0, 0.0, 0.3), (2, 3.0, 0.5)]


def test_what_vllm_says_of_asynchronous_scheduling_is_found_in_a_searchers_log(tmp_path):
    log = tmp_path / "searcher-0.log"
    lines = ['{"event": "process_started", "async_scheduling": "no"}', "a warning: model_loaded"]
    log.write_text("\n".join(lines))
    assert async_scheduling(log) == ""
    for value in (True, False):
        log.write_text("\n".join([*lines, json.dumps({"event": "model_loaded", "async_scheduling": value})]))
        assert async_scheduling(log) == str(value).lower()


def test_trls_server_serves_the_start_with_the_places_and_graphs_of_our_engine():
    argv = arguments(job(4), port=7, cpu=False)
    told = {flag: argv[argv.index(flag) + 1] for flag in argv if flag.startswith("--") and flag != argv[-1]}
    assert told["--model"].endswith("start/start") and told["--port"] == "7"
    assert (told["--max-num-seqs"], told["--max-model-len"], told["--dtype"]) == ("512", "512", "bfloat16")
    assert json.loads(told["--compilation-config"])["cudagraph_mode"] == "FULL_DECODE_ONLY"
    assert json.loads(told["--weight-transfer-config"]) == {"backend": "nccl"}
    assert "--load-format" not in argv, "it reads the start's weights"


def test_attention_by_document_is_that_of_each_document_alone():
    """Queries are the last of their keys, heads of keys are shared: as FlashAttention has it."""
    torch.manual_seed(0)
    q, k, v = torch.randn(5, 4, 8), torch.randn(9, 2, 8), torch.randn(9, 2, 8)
    cu_q, cu_k = torch.tensor([0, 2, 5]), torch.tensor([0, 6, 9])
    out = flash_attn_varlen_func(q, k, v, cu_q, cu_k, 3, 6, softmax_scale=0.3)
    for n, (begin, end) in enumerate([(0, 5), (0, 6), (6, 7), (6, 8), (6, 9)]):
        for head in range(4):
            keys, values = k[begin:end, head // 2], v[begin:end, head // 2]
            weights = (0.3 * keys @ q[n, head]).softmax(0)
            torch.testing.assert_close(out[n, head], weights @ values)
    with pytest.raises(NotImplementedError):
        flash_attn_varlen_func(q, k, v, cu_q, cu_k, 3, 6, causal=False)


def test_options_are_handed_on_as_a_command_line_has_them():
    options = argparse.Namespace(model=Path("m"), learning_rates=[1e-6, 3e-5], folder=None, repetitions=2)
    argv = flags(options, ("model", "learning_rates", "folder", "repetitions"))
    assert argv == ["--model", "m", "--learning-rates", "1e-06", "3e-05", "--repetitions", "2"]


def test_a_bench_that_is_ended_ends_what_it_started():
    program = (
        "import subprocess, sys; from bench.gpu.places import end_children_too; end_children_too()\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        "try: print(child.pid, flush=True); child.wait()\n"
        "finally: child.kill(); child.wait()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=with_paths()
    ) as bench:
        assert bench.stdout is not None
        child = int(bench.stdout.readline())
        bench.terminate()
        assert bench.wait(30) == 143
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
