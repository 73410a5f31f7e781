"""What a command line names a run by: a storage URI, a run directory of `tba run`, or a job file."""

import atexit
import os
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError

from tba.cli.waiting import ATTENDED, WaitTeller
from tba.contracts.base import Contract
from tba.contracts.config import Storage
from tba.contracts.errors import UserError
from tba.contracts.explain import first_fault
from tba.store import open_store
from tba.store.protocol import ObjectStore

RUNS = Path("runs")
STORAGE_FILE = "storage.json"
"""In a run directory: where the run's bucket is."""

Target = Annotated[str, typer.Argument(help="s3:// or file:// URI, run directory (runs/NAME), or job file.")]
Endpoint = Annotated[
    str | None, typer.Option(help="Endpoint of an S3-compatible server; default AWS_ENDPOINT_URL_S3.", metavar="URL")
]
Region = Annotated[str | None, typer.Option(help="Region; default AWS_REGION.")]


class StorageTarget(Contract):
    """Address of a run's bucket; never credentials."""

    uri: str
    endpoint: str | None = None
    region: str | None = None
    force_path_style: bool | None = None
    credentials_file: str | None = None
    """Path of an AWS credentials file, for the embedded server only."""

    @classmethod
    def read(cls, path: Path) -> "StorageTarget":
        """The address in a run directory's file. Raises: UserError if it was cut short or changed by hand."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except ValidationError as error:
            raise UserError(
                f"{path} names no storage any more: {first_fault(error)}. "
                "Delete it; `tba run` with the run's --storage writes it again, other commands take the storage URI"
            ) from error

    @classmethod
    def of(cls, storage: Storage) -> "StorageTarget":
        """The address in a job's storage section."""
        return cls(
            uri=storage.uri,
            endpoint=storage.endpoint,
            region=storage.region,
            force_path_style=storage.force_path_style,
        )


def find_target(name: str, *, endpoint: str | None = None, region: str | None = None) -> StorageTarget:
    """Raises: UserError if `name` is no URI, run directory or job file."""
    path = Path(name)
    if name.startswith(("s3://", "file://")):
        target = StorageTarget(uri=name)
    elif path.is_dir():
        target = _of_directory(path)
    elif path.suffix in (".yaml", ".yml", ".json"):
        target = _of_job(path)
    else:
        raise UserError(f"no run at {name!r}: give an s3:// or file:// URI, a directory runs/NAME, or a job file")
    return target.model_copy(update={k: v for k, v in {"endpoint": endpoint, "region": region}.items() if v})


def open_target(name: str, *, endpoint: str | None = None, region: str | None = None) -> ObjectStore:
    """The store that `name` means; of a run with an embedded server, that server runs from now on.

    Raises: UserError, StoreUnavailable.
    """
    target = find_target(name, endpoint=endpoint, region=region)
    return open_address(_served(target) if target.credentials_file and endpoint is None else target)


def open_address(target: StorageTarget) -> ObjectStore:
    """The store at an address, which does not keep a person waiting in silence. Raises: UserError."""
    if target.credentials_file:
        os.environ.setdefault("AWS_SHARED_CREDENTIALS_FILE", target.credentials_file)
    return open_store(
        target.uri,
        endpoint=target.endpoint,
        region=target.region,
        force_path_style=target.force_path_style,
        retry=ATTENDED,
        on_wait=WaitTeller(),
    )


def _served(target: StorageTarget) -> StorageTarget:
    """The target at its embedded server: that of a `tba run` that goes on, else one of ours until this process ends."""
    from tba.cli.exit import raise_on_sigterm
    from tba.store.serve import EmbeddedServer, ServedAlready

    assert target.credentials_file is not None
    server = EmbeddedServer(Path(target.credentials_file).parent)
    try:
        server.start()
    except ServedAlready as running:
        server.endpoint = running.endpoint or target.endpoint or ""
    else:
        atexit.register(server.stop)  # commands are short and leave their store open until they end
        raise_on_sigterm()  # else nobody would stop it
    os.environ.update(server.env)  # a key pair in the environment would go before the server's own
    return target.model_copy(update={"endpoint": server.endpoint})


def _of_directory(path: Path) -> StorageTarget:
    record = path / STORAGE_FILE
    if record.is_file():
        return StorageTarget.read(record)
    if (path / "latest").is_file() or (path / "run.json").is_file():
        return StorageTarget(uri=f"file://{path.resolve()}")
    raise UserError(f"{path}: holds no run: expected {STORAGE_FILE} (written by `tba run`) or the store itself")


def _of_job(path: Path) -> StorageTarget:
    from tba.cli.jobfile import load_job

    job = load_job(path)
    local = RUNS / job.metadata.name
    if (local / STORAGE_FILE).is_file():  # `tba run` of this job keeps its own store
        return _of_directory(local)
    return StorageTarget.of(job.spec.storage)
