"""Starts `rank_runs.py` with some ranks and compares what it leaves; on a CPU and on GPUs."""

import os
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests/support/rank_runs.py"
RECIPES = ["plain", "oversized", "one_group", "ratio", "ema", "reset", "clipped", "recomputed", "bfloat16"]
RECIPES += ["adapter", "adapter_recomputed"]


def rank_environment(**more: str) -> dict[str, str]:
    """For a process of the program."""
    paths = [str(ROOT / "workloads"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": ":".join(filter(None, paths)), **more}


def run_ranks(num_ranks: int, folder: Path, *names: str, code: int = 0, **environment: str) -> str:
    """What it wrote to standard error; it must end with `code`."""
    argv = [sys.executable, str(PROGRAM), str(num_ranks), str(folder), *names]
    done = subprocess.run(argv, env=rank_environment(**environment), capture_output=True, text=True, timeout=280)
    assert done.returncode == code, done.stderr[-4000:]
    return done.stderr


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], prefix: str) -> float:
    """Between the tensors of this prefix, which both must have."""
    names = [n for n in one if n.startswith(prefix)]
    assert names and set(names) == {n for n in other if n.startswith(prefix)}
    return max((one[n].double() - other[n].double()).abs().max().item() for n in names if one[n].numel())
