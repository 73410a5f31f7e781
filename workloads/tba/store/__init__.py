"""Where runs live: one protocol, two stores. Start at `open_store`; the promises are in protocol.py."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from tba.contracts.errors import UserError
from tba.store.protocol import (
    AccessDenied,
    AlreadyExists,
    Conflict,
    NotFound,
    ObjectInfo,
    ObjectStore,
    OutOfSpace,
    Readable,
    StoredObject,
)
from tba.store.retry import Observer, RetryPolicy, Wait, WaitListener, Weather

if TYPE_CHECKING:
    from tba.store.transfer import TransferSettings

__all__ = [
    "AccessDenied",
    "AlreadyExists",
    "Conflict",
    "NotFound",
    "ObjectInfo",
    "ObjectStore",
    "OutOfSpace",
    "Readable",
    "RetryPolicy",
    "StoredObject",
    "Wait",
    "WaitListener",
    "Weather",
    "open_store",
]


def open_store(
    uri: str,
    *,
    endpoint: str | None = None,
    region: str | None = None,
    force_path_style: bool | None = None,
    ca_bundle: Path | None = None,
    retry: RetryPolicy | None = None,
    transfer: "TransferSettings | None" = None,
    observe: Observer | None = None,
    weather: Weather | None = None,
    on_wait: WaitListener | None = None,
) -> ObjectStore:
    """Open the store at `s3://bucket/prefix`, `file:///absolute` or `file://relative`; sends nothing yet.

    Endpoint, region and CA default to boto3's environment variables; credentials come from
    `$TBA_CREDENTIALS_DIR` or its chain only. `weather` is told how requests fare, `on_wait` of each sleep between two
    attempts.
    Raises: UserError for a malformed URI or missing credentials.
    """
    if uri.startswith("s3://"):
        # Imported here: a run in a directory needs neither obstore nor boto3.
        from tba.store.access import find_credentials, locate
        from tba.store.s3 import S3Store

        location = locate(
            uri,
            endpoint=endpoint,
            region=region,
            force_path_style=force_path_style,
            ca_bundle=ca_bundle,
            environ=os.environ,
        )
        keys = find_credentials(os.environ)
        return S3Store(
            location, keys, retry=retry, settings=transfer, observe=observe, weather=weather, on_wait=on_wait
        )
    path = uri.removeprefix("file://")
    if path == uri or not path:
        raise UserError(f"storage URI must be s3://bucket/prefix or file://directory, got {uri!r}")
    from tba.store.local import LocalStore

    return LocalStore(Path(path), retry=retry, observe=observe, weather=weather, on_wait=on_wait)
