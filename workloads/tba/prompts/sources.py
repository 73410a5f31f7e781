"""Rows of a prompt source, each with its place: JSON Lines (plain or gzip), Parquet files, Hugging Face data sets.

Rows come lazily, so that a limit reads no more than it needs. Every fault of the data names its place.
"""

import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from tba.contracts.config import Prompts
from tba.contracts.errors import StoreUnavailable, UserError
from tba.mounts import claim_path, config_map_file
from tba.store import NotFound, ObjectStore

Row = dict[str, Any]
Placed = tuple[str, Row]
"""Where the row stands in its source, such as `line 21`, and the row."""
OpenStore = Callable[[str], ObjectStore]
_LINES = (".jsonl", ".ndjson", ".json")
_GZIP_MAGIC = b"\x1f\x8b"


def rows(config: Prompts, *, base_dir: Path, open_store: OpenStore, token: str | None = None) -> Iterator[Placed]:
    """Rows of the source in their order. `token`: of the hub; null takes the environment's.

    Raises: UserError; StoreUnavailable.
    """
    name = name_of(config)
    if config.uri is None:
        assert config.config_map_ref is not None  # exactly one of the two, by its validator
        return _file_rows(name, config_map_file(config.config_map_ref, "prompts").open("rb"))
    scheme, _, rest = config.uri.partition("://")
    if scheme == "hf":
        return _hub_rows(rest, config.split, token)
    if scheme == "pvc":
        return _file_rows(name, _open_file(name, claim_path(config.uri, "prompts.uri")))
    if scheme == "file":
        return _file_rows(name, _open_file(name, base_dir / rest))
    return _file_rows(name, _open_object(config.uri, open_store))


def name_of(config: Prompts) -> str:
    """The source as its job names it: for messages; ends as the file does."""
    reference = config.config_map_ref
    return config.uri or (f"configMapRef {reference.name}/{reference.key}" if reference else "")


def columns_of(row: Row) -> str:
    """Names of a row's columns for an error message."""
    return ", ".join(sorted(map(str, row))) or "none"


def _open_file(uri: str, path: Path) -> BinaryIO:
    if not path.is_file():
        relative = uri.startswith("file://") and not uri.startswith("file:///")
        remedy = "a relative path starts at the folder of the job file" if relative else "check the path"
        raise UserError(f"prompts.uri {uri}: no file {path}: {remedy}")
    return path.open("rb")


def object_bytes(uri: str, open_store: OpenStore) -> int:
    """Size of an s3:// source. Raises: UserError if it is not there; StoreUnavailable."""
    with _object(uri, open_store) as (store, key):
        return store.head(key).size


def _open_object(uri: str, open_store: OpenStore) -> BinaryIO:
    with _object(uri, open_store) as (store, key):
        return io.BytesIO(store.get(key).data)


@contextmanager
def _object(uri: str, open_store: OpenStore) -> Iterator[tuple[ObjectStore, str]]:
    """The store and key of one object, open within."""
    parent, _, name = uri.rpartition("/")
    if not name or parent.endswith("/"):  # s3://bucket/key at least
        raise UserError(f"prompts.uri must name one object as s3://bucket/key.jsonl, got {uri}")
    store = open_store(parent)
    try:
        yield store, name
    except NotFound as error:
        raise UserError(f"prompts.uri {uri}: no such object: check the bucket, the key and storage.endpoint") from error
    finally:
        store.close()


def _file_rows(uri: str, source: BinaryIO) -> Iterator[Placed]:
    name = uri.lower().removesuffix(".gz")
    if name.endswith(".parquet"):
        return _parquet_rows(uri, source)
    if name.endswith(_LINES):
        return _json_rows(uri, source)
    source.close()
    raise UserError(f"prompts {uri}: unknown file type: name it .jsonl, .jsonl.gz or .parquet")


def _json_rows(uri: str, source: BinaryIO) -> Iterator[Placed]:
    number = 0
    with source:
        packed = source.read(2) == _GZIP_MAGIC
        source.seek(0)
        try:
            with gzip.open(source) if packed else source as lines:
                for number, line in enumerate(lines, 1):
                    if number == 1:
                        line = line.removeprefix(b"\xef\xbb\xbf")  # written by some editors
                    if line.strip():
                        yield f"line {number}", _json_row(uri, number, line)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise UserError(f"{uri}: damaged gzip file after line {number}: {error}: copy it again") from error


def _json_row(uri: str, number: int, line: bytes) -> Row:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{uri} line {number} is not JSON: {error}: write one JSON object a line") from error
    if not isinstance(row, dict):
        raise UserError(f"{uri} line {number} holds a {type(row).__name__}: write one JSON object a line")
    return row


def _parquet_rows(uri: str, source: BinaryIO) -> Iterator[Placed]:
    with source:
        try:
            batches = pq.ParquetFile(source).iter_batches(batch_size=1024, use_threads=False)
            for number, row in enumerate((row for batch in batches for row in batch.to_pylist()), 1):
                yield f"row {number}", row
        except (pa.ArrowException, OSError) as error:
            raise UserError(f"{uri} is not a readable Parquet file: {error}") from error


def _hub_rows(rest: str, split: str, token: str | None) -> Iterator[Placed]:
    """`rest` is org/name[@revision] or org/name[@revision]/configuration."""
    parts = rest.strip("/").split("/")
    if not 2 <= len(parts) <= 3:
        raise UserError(f"prompts.uri must be hf://org/name or hf://org/name/configuration, got hf://{rest}")
    name, _, revision = parts[1].partition("@")
    try:
        import datasets  # heavy, and only the trainer of a hub run needs it
    except ModuleNotFoundError as error:
        raise UserError("prompts.uri hf:// needs the package datasets: install tba-operator[trainer]") from error
    where = f"prompts.uri hf://{rest} split {split!r}"
    try:
        data = datasets.load_dataset(
            f"{parts[0]}/{name}",
            parts[2] if len(parts) == 3 else None,
            split=split,
            revision=revision or None,
            token=token,
        )
    except (ValueError, FileNotFoundError) as error:
        raise UserError(f"{where} cannot be loaded: {error}: check name, configuration, split and HF_TOKEN") from error
    except OSError as error:
        raise StoreUnavailable(f"{where}: the hub could not be reached: {error}: check the network") from error
    return ((f"row {number}", dict(row)) for number, row in enumerate(data, 1))
