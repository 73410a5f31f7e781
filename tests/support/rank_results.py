"""Starts `rank_runs.py` with some ranks and compares what it leaves; on a CPU and on GPUs."""

import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests/support/rank_runs.py"
RECIPES = ["plain", "oversized", "one_group", "ratio", "ema", "reset", "clipped", "recomputed", "selective"]
RECIPES += ["bfloat16", "adapter", "adapter_recomputed"]


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


class TwoNodes:
    """The program on two nodes of this machine: rank 0's at one loopback address, the other elsewhere."""

    def __init__(self, num_ranks: int, folder: Path, *names: str) -> None:
        """`num_ranks`: of a node."""
        with socket.create_server(("", 0)) as free:
            port = free.getsockname()[1]
        self._environment = rank_environment(
            OMP_NUM_THREADS="1", NUM_NODES="2", NODE_0="127.0.0.2", NODE_0_PORT=str(port)
        )
        self.leader = self._start(str(num_ranks), str(folder), *names)
        self.node = self._start("node", "1", str(num_ranks))

    def _start(self, *arguments: str) -> "subprocess.Popen[str]":
        argv = [sys.executable, str(PROGRAM), *arguments]
        return subprocess.Popen(argv, env=self._environment, stderr=subprocess.PIPE, text=True)

    def end(self, timeout_seconds: float = 280) -> tuple[int, int, str]:
        """Exit codes of node 0 and node 1 when both have ended, and what node 0 said."""
        with ThreadPoolExecutor() as pool:
            told, _ = pool.map(lambda process: process.communicate(timeout=timeout_seconds)[1], self._both)
        return self.leader.returncode, self.node.returncode, told

    def close(self) -> None:
        """Leave neither behind."""
        for process in self._both:
            process.kill()
            process.wait()
            assert process.stderr is not None
            process.stderr.close()

    @property
    def _both(self) -> "tuple[subprocess.Popen[str], subprocess.Popen[str]]":
        return self.leader, self.node


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], prefix: str) -> float:
    """Between the tensors of this prefix, which both must have."""
    names = [n for n in one if n.startswith(prefix)]
    assert names and set(names) == {n for n in other if n.startswith(prefix)}
    return max((one[n].double() - other[n].double()).abs().max().item() for n in names if one[n].numel())
