"""The store of a run, opened the same way by every process of it: the job's endpoint settings, requests counted."""

from tba import telemetry
from tba.contracts.config import Storage
from tba.store import ObjectStore, Weather, open_store


def open_run_store(storage: Storage, uri: str, weather: Weather | None = None) -> ObjectStore:
    """The store at `uri` with the endpoint settings of `storage`. Raises: UserError."""
    return open_store(
        uri,
        endpoint=storage.endpoint,
        region=storage.region,
        force_path_style=storage.force_path_style,
        observe=telemetry.count_storage_request,
        weather=weather,
    )
