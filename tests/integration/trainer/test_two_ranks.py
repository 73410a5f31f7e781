"""Several ranks train as one does: real processes, gloo, FSDP2 on the CPU."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.pids import children_of, wait_until_gone
from support.rank_results import PROGRAM, RECIPES, largest_difference, rank_environment, run_ranks

from tba.contracts.errors import UserError

TOLERANCE = 1e-6
ROUNDING = {"bfloat16": 2e-3}
"""A master's step may differ where the sums of bf16 gradients round differently; the learning rate is 1e-3."""


def environment() -> dict[str, str]:
    return rank_environment(OMP_NUM_THREADS="1")


def run(num_ranks: int, folder: Path, *names: str, code: int = 0) -> str:
    return run_ranks(num_ranks, folder, *names, code=code, OMP_NUM_THREADS="1")


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """By number of ranks: the folder with each recipe's results, and what was said."""
    folders = {n: tmp_path_factory.mktemp(f"ranks-{n}") for n in (1, 2)}
    return {num_ranks: (folder, run(num_ranks, folder, *RECIPES)) for num_ranks, folder in folders.items()}


@pytest.fixture(scope="module")
def results(told):
    return {num_ranks: folder for num_ranks, (folder, _) in told.items()}


@pytest.mark.parametrize("recipe", RECIPES)
def test_two_ranks_give_the_update_of_one(results, recipe):
    one, two = (load_file(results[n] / f"{recipe}.safetensors") for n in (1, 2))
    allowed = ROUNDING.get(recipe, TOLERANCE)
    for what in ("master/", "staged/", "optimizer/"):
        assert largest_difference(one, two, what) <= allowed, what


@pytest.mark.parametrize("recipe", RECIPES)
def test_two_ranks_report_the_log_ratios_and_weights_of_one(results, recipe):
    one, two = (load_file(results[n] / f"{recipe}.safetensors") for n in (1, 2))
    allowed = 0.05 if recipe == "bfloat16" else 2e-5
    for what in ("ell/", "weights/", "log_z/"):
        assert largest_difference(one, two, what) <= allowed, what
    losses = [torch.stack([t[:2] for n, t in sorted(r.items()) if n.startswith("numbers/")]) for r in (one, two)]
    torch.testing.assert_close(*losses, rtol=1e-2 if recipe == "bfloat16" else 1e-4, atol=1e-5)


KEPT = {"ema": ("master/", "optimizer/", "reference/"), "adapter": ("master/", "optimizer/")}


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """A folder where runs went on with another number of ranks, and one where a single rank did all."""
    mixed, alone = tmp_path_factory.mktemp("mixed"), tmp_path_factory.mktemp("alone")
    for num_ranks, start in ((1, 0), (2, 2), (1, 4)):
        run(num_ranks, mixed, *(f"resume:{start}:{recipe}" for recipe in KEPT))
    run(1, alone, *(f"resume:{start}:{recipe}" for recipe in KEPT for start in (0, 2, 4)))
    return mixed, alone


@pytest.mark.parametrize("recipe", KEPT)
def test_a_checkpoint_of_one_rank_goes_on_with_two_and_their_checkpoint_with_one(resumed, recipe):
    mixed, never = (load_file(folder / f"resume:4:{recipe}.safetensors") for folder in resumed)
    for what in KEPT[recipe]:
        assert largest_difference(mixed, never, what) <= TOLERANCE, what


def test_ranks_leave_in_order_when_all_is_done(told):
    assert "rank left" in told[2][1]


def test_an_error_that_all_ranks_raise_ends_with_its_own_code_and_words(tmp_path):
    told = run(2, tmp_path, "refused", code=UserError.exit_code)
    assert "cannot compute packed rows" in told and "trainer rank 1 ended" not in told


@pytest.fixture
def training(tmp_path):
    """A trainer of two ranks amid its steps, and the pid of rank 1."""
    argv = [sys.executable, str(PROGRAM), "2", str(tmp_path), "forever"]
    with subprocess.Popen(argv, env=environment(), stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while "training" not in process.stderr.readline():
            assert process.poll() is None
        yield process, children_of(process.pid)[0]
        process.kill()


def test_a_rank_that_is_killed_amid_a_step_ends_rank_0_with_words_for_it(training):
    process, child = training
    os.kill(child, signal.SIGKILL)
    _, told = process.communicate(timeout=30)
    assert process.returncode == 7
    assert "trainer rank 1 ended with SIGKILL" in told


def test_ranks_end_with_a_trainer_that_is_killed(training):
    process, child = training
    process.kill()
    wait_until_gone(child)
