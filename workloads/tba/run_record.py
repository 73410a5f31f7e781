"""The bucket's `run.json`: one way to read it, one answer to a run of another release."""

from pydantic import ValidationError

from tba.contracts.errors import UserError
from tba.contracts.keys import RUN
from tba.contracts.records import RunRecord
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
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "the whole file"
        raise UserError(
            f"run.json at {store.uri} is not of this version: {place}: {first['msg']}. "
            "Use the release that began the run, or another storage prefix"
        ) from error
