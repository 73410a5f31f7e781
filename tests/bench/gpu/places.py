"""Where the benches find what is not theirs: the task `count`, a start folder to rehearse with, processes of arms."""

import argparse
import importlib.util
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
COUNT = ROOT / "examples" / "count"
JOB = ROOT / "examples" / "count.yaml"


def count_task() -> ModuleType:
    """examples/count/count_task.py, which lies on no import path."""
    name = "count_task"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, COUNT / "count_task.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


def tiny_start(folder: Path, *, task: str = "count", train_prompts: int = 64, held_out: int = 8) -> Path:
    """A start folder with a random model of some thousand parameters: rehearsals need no GPU and no download."""
    make = [sys.executable, str(COUNT / "make_start.py"), "--tiny", "--task", task, "--steps", "2", "--batch", "2"]
    make += ["--train-prompts", str(train_prompts), "--held-out", str(held_out), "-o", str(folder)]
    subprocess.run(make, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return folder


def end_children_too() -> None:
    """SIGTERM, as `timeout` sends it, becomes an exception: who started processes ends them on the way out."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def flags(options: argparse.Namespace, names: Sequence[str]) -> list[str]:
    """Options as a command line has them, for a bench that starts itself: `--name value ...`; None is left out."""
    argv: list[str] = []
    for name in names:
        value = getattr(options, name)
        if value is not None:
            argv += [f"--{name.replace('_', '-')}", *map(str, value if isinstance(value, list) else [value])]
    return argv


def in_child(argv: Sequence[str], *, env: Mapping[str, str] | None = None, quiet: bool = False) -> Any:
    """What `python ARGV --result FILE` wrote to its file as JSON: engines write to standard output as they like.

    Raises: RuntimeError with the end of its errors (if `quiet`) if it failed or wrote nothing.
    """
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        done = subprocess.run(
            [sys.executable, *argv, "--result", str(result)],
            env=None if env is None else dict(env),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE if quiet else None,
            text=True,
        )
        # An engine may fail at its own end, after everything was measured.
        if not result.exists():
            raise RuntimeError(f"{' '.join(argv[:3])} ended with {done.returncode}: {(done.stderr or '')[-800:]}")
        return json.loads(result.read_text())
