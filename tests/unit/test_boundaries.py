"""What may be imported by what, and when."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = ["torch", "transformers", "vllm", "pyarrow", "numpy", "pydantic", "obstore", "boto3", "matplotlib", "jinja2"]


def imported(code):
    """Top-level modules loaded by `code` in a fresh interpreter."""
    script = (
        f"import sys\n{code}\nsys.stderr.write('MODULES ' + ' '.join(sorted({{m.split('.')[0] for m in sys.modules}})))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT / "workloads", timeout=120, check=False
    )
    assert "MODULES " in done.stderr, done.stderr
    return set(done.stderr.rpartition("MODULES ")[2].split())


def tree_of_tests():
    """(folder, its files) below tests/, without what runs leave behind there: tests/cluster/.run and the like."""
    for folder, inner, files in os.walk(ROOT / "tests"):
        inner[:] = [name for name in inner if not name.startswith(".")]
        yield Path(folder), files


def help_of(arguments):
    return f"from tba.cli import main\ntry:\n    main({arguments})\nexcept SystemExit as end:\n    assert end.code == 0"


def test_help_imports_nothing_heavy():
    assert not imported(help_of(["--help"])) & {*HEAVY, "aiohttp", "kopf", "kubernetes", "yaml"}


@pytest.mark.parametrize("command", ["run", "status", "inspect", "export", "eval", "storage", "trainer"])
def test_help_of_a_command_imports_no_torch(command):
    assert not imported(help_of([command, "--help"])) & {"torch", "transformers", "vllm", "matplotlib"}


@pytest.mark.parametrize(
    "module",
    ["contracts.job", "contracts.history", "contracts.runfile", "protocol", "store", "store.s3", "store.local",
     "cli.local_run", "cli.target", "report.page", "telemetry", "log"],
)  # fmt: skip
def test_no_torch_behind(module):
    assert not imported(f"import tba.{module}") & {"torch", "transformers", "vllm"}


def test_a_searcher_that_needs_no_weights_runs_without_torch():
    assert not imported("import tba.searcher.main, tba.searcher.engines.fake") & {"torch", "transformers", "vllm"}


def test_contracts_need_the_standard_library_and_pydantic_only():
    loaded = imported("import tba.contracts.job, tba.contracts.records, tba.contracts.history, tba.contracts.runfile")
    assert not loaded & {"numpy", "pyarrow", "yaml", "structlog", "typer", "obstore"}


def test_the_operators_folder_does_not_hide_the_standard_librarys_module():
    assert not (ROOT / "operator" / "__init__.py").exists()
    assert "operator" not in {folder.name for folder, _ in tree_of_tests()}
    done = subprocess.run(
        [sys.executable, "-c", "import operator; print(operator.__file__)"],
        capture_output=True, text=True, cwd=ROOT, timeout=60, check=True,
    )  # fmt: skip
    assert not Path(done.stdout.strip()).is_relative_to(ROOT)


def test_tests_are_no_packages_and_their_names_are_unique():
    files = [name for _, names in tree_of_tests() for name in names if name.endswith(".py")]
    assert "__init__.py" not in files
    names = [name for name in files if name.startswith("test_")]
    assert sorted(names) == sorted(set(names))


def test_source_names_no_folder_of_this_machine():
    texts = {p: p.read_text(encoding="utf-8") for p in (ROOT / "workloads").rglob("*") if p.suffix in (".py", ".j2")}
    assert not [str(p) for p, text in texts.items() if "/work/" in text or "/root/" in text]
