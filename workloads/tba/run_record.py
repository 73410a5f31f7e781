"""The bucket's `run.json`: one way to read it, one answer to a run of another release."""

import json
from typing import Any

from pydantic import ValidationError

from tba.contracts.errors import UserError
from tba.contracts.explain import first_fault
from tba.contracts.keys import RUN
from tba.contracts.records import RunRecord
from tba.contracts.runfile import RunFile
from tba.store.protocol import NotFound, ObjectStore


def read_run_record(store: ObjectStore) -> RunRecord:
    """Raises: UserError if there is no run or it is of another release; StoreUnavailable."""
    record = find_run_record(store)
    if record is None:
        raise UserError(f"no run at {store.uri}: it has no {RUN}. Check the URI, or start the run")
    return record


def find_run_record(store: ObjectStore) -> RunRecord | None:
    """None if nothing has made a run yet. Raises: UserError if it is of another release; StoreUnavailable."""
    try:
        data = store.get(RUN).data
    except NotFound:
        return None
    try:
        return RunRecord.model_validate_json(data)
    except ValidationError as error:
        raise UserError(
            f"run.json at {store.uri} is not of this version: {first_fault(error)}. "
            "Use the release that began the run, restore the object from a copy, or use another storage prefix"
        ) from error


def refuse_foreign(record: RunRecord, run: RunFile, *, adopt: bool) -> None:
    """Raises: UserError if the record is of another job (unless `adopt`), or `run` changes what may not change."""
    if record.owner != run.owner and not adopt:
        raise UserError(
            f"this storage prefix holds a run of job {record.owner}, this is {run.owner}: "
            "use another storage.uri, or set storage.adopt: true to take the run over"
        )
    changed = differences(record.config.identity(), run.config.identity())
    if changed:
        raise UserError(
            "these fields may not change during a run: " + "; ".join(changed) + ". "
            "Undo the change, use another storage.uri, or delete the run with `tba storage delete`"
        )


def differences(old: dict[str, Any], new: dict[str, Any], path: str = "") -> list[str]:
    """What changed from one JSON object to another, a text for each field, in order of their names."""
    found: list[str] = []
    for name in sorted(old.keys() | new.keys()):
        a, b = old.get(name), new.get(name)
        if isinstance(a, dict) and isinstance(b, dict):
            found += differences(a, b, f"{path}{name}.")
        elif a != b:
            found.append(f"{path}{name} was {json.dumps(a)}, is now {json.dumps(b)}")
    return found
