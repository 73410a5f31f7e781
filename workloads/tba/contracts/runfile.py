"""The two files a process is configured with: `run.json` (frozen) and `live.json` (may change), in one directory.

Written by `tba run` or mounted from a ConfigMap by the operator; read by trainer and searcher.
"""

import json
import os
from pathlib import Path
from typing import TypeVar

from pydantic import Field, ValidationError

from tba.contracts.base import Contract
from tba.contracts.config import LiveConfig, RunConfig
from tba.contracts.errors import UserError
from tba.contracts.explain import explain
from tba.contracts.job import TBAJob

RUN_FILE = "run.json"
LIVE_FILE = "live.json"

T = TypeVar("T", bound=Contract)


class RunFile(Contract):
    """`run.json` of a configuration directory (not the bucket's `run.json`, which is a `RunRecord`)."""

    owner: str = Field(min_length=1)
    """namespace/name of the job."""
    name: str = Field(min_length=1)
    """Name of the job: the `run` of log lines."""
    base_dir: str | None = None
    """What a relative file:// URI is relative to; null: there are none."""
    config: RunConfig


def write_config(directory: Path, job: TBAJob, *, live: LiveConfig | None = None, base_dir: str | None = None) -> None:
    """Write both files of `job` into `directory`, each atomically; `live` replaces the job's own live half."""
    directory.mkdir(parents=True, exist_ok=True)
    run = RunFile(owner=job.owner, name=job.metadata.name, base_dir=base_dir, config=job.spec.run_config())
    _write(directory / RUN_FILE, run)
    _write(directory / LIVE_FILE, live if live is not None else job.spec.live_config())


def read_run_file(directory: Path) -> RunFile:
    """Raises: UserError if `run.json` is absent or wrong."""
    path = directory / RUN_FILE
    return _read(path, RunFile)


def read_live_config(directory: Path) -> LiveConfig:
    """Raises: UserError if `live.json` is absent or wrong; a process that runs keeps its old one then."""
    path = directory / LIVE_FILE
    return _read(path, LiveConfig)


def _write(path: Path, record: Contract) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(json.loads(record.to_json()), indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)


def _read(path: Path, kind: type[T]) -> T:
    try:
        data = path.read_bytes()  # undecoded: what is no UTF-8 is no JSON
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read: {error.strerror}. "
            f"Pass the directory that holds {RUN_FILE} and {LIVE_FILE} (`tba run` writes them to runs/NAME/config)"
        ) from error
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        raise explain(error, str(path)) from error
