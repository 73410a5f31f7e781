"""Does this store keep the promises that the protocol rests on? Asked before a run, by doing it.

Several S3-compatible servers accept conditional writes and ignore the condition: two trainers would then both
believe they had won. Every check works under one fresh prefix, which is removed in the end.
"""

import base64
import contextlib
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tba.contracts.errors import CorruptObject, UserError
from tba.contracts.keys import PROBE, new_nonce
from tba.store.protocol import AlreadyExists, Conflict, NotFound, ObjectStore

if TYPE_CHECKING:
    from tba.store.s3 import S3Store

_NUM_RACERS = 12
_NUM_SWAPPERS = 6
_NUM_INCREMENTS = 3
_NUM_PART_RACERS = 4
_NUM_PART_ROUNDS = 3
_MAX_TRIES = 200
_SKEW_WARNING_SECONDS = 60.0
_SKEW_LIMIT_SECONDS = 900.0


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """One check. A result that is not `ok` matters only if `severity` is `error`."""

    name: str
    ok: bool
    detail: str
    severity: Literal["error", "warning"] = "error"


def probe(store: ObjectStore, *, clock: Callable[[], float] = time.time) -> list[ProbeResult]:
    """Run every check against `store`; needs read, write, list and delete.

    Raises: UserError or StoreUnavailable if the store cannot be used at all.
    """
    prefix = f"{PROBE}{new_nonce()}/"
    checks: list[Callable[[], ProbeResult]] = [
        lambda: _round_trip(store, prefix),
        lambda: _create_race(store, prefix),
        lambda: _swap_race(store, prefix),
        lambda: _unchanged(store, prefix),
        lambda: _ranges(store, prefix),
        lambda: _order(store, prefix),
        lambda: _clock_skew(store, clock),
        *_s3_checks(store, prefix),
        lambda: _deletion(store, prefix),
    ]
    try:
        return [check() for check in checks]
    finally:
        # Also after a failure half-way; what cannot be removed is reported by the error under way.
        with contextlib.suppress(UserError):
            store.delete([info.key for info in store.list_after(prefix)])


def require(results: Sequence[ProbeResult]) -> None:
    """Raises: UserError naming each failed check (warnings pass)."""
    failed = [r for r in results if not r.ok and r.severity == "error"]
    if failed:
        listed = "; ".join(f"{r.name}: {r.detail}" for r in failed)
        raise UserError(
            f"this storage cannot hold a run: {listed}; use a store with conditional writes (AWS S3, MinIO, "
            "SeaweedFS 4.48 or newer, a local directory), or set storage.unsafeSingleTrainer: true"
        )


def _round_trip(store: ObjectStore, prefix: str) -> ProbeResult:
    store.put_once(prefix + "object", b"tba")
    store.put_once(prefix + "object", b"tba")
    ok = store.get(prefix + "object").data == b"tba"
    with contextlib.suppress(AlreadyExists):
        store.put_once(prefix + "object", b"other")
        ok = False
    return ProbeResult("put_once", ok, "written, read back, not overwritten" if ok else "the object was overwritten")


def _create_race(store: ObjectStore, prefix: str) -> ProbeResult:
    winners: list[bytes] = []

    def create(index: int) -> None:
        body = b"%d" % index
        with contextlib.suppress(AlreadyExists):
            store.put_once(prefix + "race", body)
            winners.append(body)

    _race(create, _NUM_RACERS)
    ok = len(winners) == 1 and store.get(prefix + "race").data == winners[0]
    return ProbeResult("create_race", ok, f"{len(winners)} of {_NUM_RACERS} concurrent creations won, need 1")


def _swap_race(store: ObjectStore, prefix: str) -> ProbeResult:
    key = prefix + "counter"
    _swap(store, key, b"0 begun", None)
    won: set[bytes] = set()
    seen: set[bytes] = set()  # whoever swaps has read what was there before: of swaps that took place none is missed

    def increment(index: int) -> None:
        done = 0
        for _ in range(_MAX_TRIES):
            if done == _NUM_INCREMENTS:
                return
            current = store.get(key)
            value, nonce = current.data.split()
            seen.add(nonce)
            # The nonce keeps equal counts apart, as in the protocol: etags may be hashes of the content.
            mine = secrets.token_hex(8).encode()
            with contextlib.suppress(Conflict):
                store.cas(key, b"%d %s" % (int(value) + 1, mine), current.etag)
                done += 1
                won.add(mine)

    _race(increment, _NUM_SWAPPERS)
    final, nonce = store.get(key).data.split()
    changes = len(seen | {nonce}) - 1  # but for the first
    lost = won - seen - {nonce}
    # More changes than winners: the reply to one was lost, and its author could not know that it had won.
    ok = int(final) == changes and not lost and bool(won)
    told = f"{len(won)} compare-and-swaps succeeded, {len(lost)} of them without effect"
    return ProbeResult("swap_race", ok, f"{told}; the counter stands at {int(final)} after {changes} changes")


def _swap(store: ObjectStore, key: str, data: bytes, etag: str | None) -> str:
    """Swap where nobody else does. Raises: Conflict, unless only the reply was lost."""
    try:
        return store.cas(key, data, etag)
    except Conflict:
        found = store.get(key)
        if found.data != data:
            raise
        return found.etag


def _unchanged(store: ObjectStore, prefix: str) -> ProbeResult:
    etag = _swap(store, prefix + "pointer", b"a", None)
    same = store.get_if_changed(prefix + "pointer", etag)
    _swap(store, prefix + "pointer", b"b", etag)
    new = store.get_if_changed(prefix + "pointer", etag)
    ok = same is None and new is not None and new.data == b"b"
    return ProbeResult("get_if_changed", ok, "only a change has a body" if ok else f"{same}, then {new}")


def _ranges(store: ObjectStore, prefix: str) -> ProbeResult:
    data = os.urandom(100_000)
    store.put_once(prefix + "ranges", data)
    target = bytearray(50_000)
    store.read_into(prefix + "ranges", memoryview(target), offset=1234)
    if bytes(target) != data[1234:51_234]:
        return ProbeResult("ranges", False, "a ranged read returned other bytes")
    try:
        store.read_into(prefix + "ranges", memoryview(target), offset=99_000)
    except CorruptObject:
        return ProbeResult("ranges", True, "ranged reads are exact, reads past the end are refused")
    return ProbeResult("ranges", False, "a read past the end was not refused")


def _order(store: ObjectStore, prefix: str) -> ProbeResult:
    keys = [f"{prefix}order/{i:010d}" for i in (5, 3, 1, 4, 2)]
    for key in keys:
        store.put_once(key, key.encode())
    listed = [info.key for info in store.list_after(f"{prefix}order/", sorted(keys)[1])]
    ok = listed == sorted(keys)[2:]
    return ProbeResult("list_after", ok, "keys come in order, from the cursor on" if ok else f"got {listed}")


def _clock_skew(store: ObjectStore, clock: Callable[[], float]) -> ProbeResult:
    before = clock()
    server = store.now()
    skew = server - (before + clock()) / 2
    detail = f"the server's clock is {skew:+.1f} s from this machine's"
    if abs(skew) > _SKEW_LIMIT_SECONDS:
        return ProbeResult("clock", False, f"{detail}, beyond the 15 minutes that signatures allow: run NTP")
    return ProbeResult("clock", abs(skew) <= _SKEW_WARNING_SECONDS, detail, severity="warning")


def _deletion(store: ObjectStore, prefix: str) -> ProbeResult:
    keys = [info.key for info in store.list_after(prefix)]
    store.delete([*keys, prefix + "never-written"])
    left = [info.key for info in store.list_after(prefix)]
    with contextlib.suppress(NotFound):
        store.get(prefix + "object")
        left.append(prefix + "object")
    return ProbeResult("delete", not left, f"deleted {len(keys)} objects" if not left else f"still there: {left[:3]}")


def _s3_checks(store: ObjectStore, prefix: str) -> Iterator[Callable[[], ProbeResult]]:
    if not store.uri.startswith("s3://"):
        return
    from tba.store.s3 import S3Store

    if isinstance(store, S3Store):
        yield lambda: _create_in_parts(store, prefix)
        yield lambda: _create_in_parts_race(store, prefix)
        yield lambda: _wrong_checksum(store, prefix)


def _create_in_parts(store: "S3Store", prefix: str) -> ProbeResult:
    from tba.store.transfer import UploadLost

    path, subject = store.location.path(prefix + "parts"), f"{store.uri}/{prefix}parts"
    with contextlib.suppress(AlreadyExists, UploadLost):  # by itself: the reply was lost
        store.transfer.create_in_parts(path, subject, memoryview(b"first"))
    store.put_once(prefix + "parts", b"first")
    try:
        store.transfer.create_in_parts(path, subject, memoryview(b"second"))
    except (AlreadyExists, UploadLost):
        ok = store.get(prefix + "parts").data == b"first"
        return ProbeResult("create_in_parts", ok, "a multipart upload does not overwrite")
    return ProbeResult("create_in_parts", False, "a conditional multipart upload overwrote the object")


def _create_in_parts_race(store: "S3Store", prefix: str) -> ProbeResult:
    """Only a warning: every large object of a run has a key that no other writer can have."""
    num_winners: list[int] = []
    for number in range(_NUM_PART_ROUNDS):
        key = f"{prefix}parts-race/{number:010d}"
        num_winners.append(_race_in_parts(store, key))
    detail = f"concurrent multipart creations of one key: winners per round {num_winners}, need 1 each"
    return ProbeResult("create_in_parts_race", set(num_winners) == {1}, detail, severity="warning")


def _race_in_parts(store: "S3Store", key: str) -> int:
    from tba.store.transfer import UploadLost

    winners: list[int] = []

    def create(index: int) -> None:
        # UploadLost: a collision that the server noticed; the writer would read back and find another's bytes.
        with contextlib.suppress(AlreadyExists, UploadLost):
            store.transfer.create_in_parts(store.location.path(key), f"{store.uri}/{key}", memoryview(b"%d" % index))
            winners.append(index)

    _race(create, _NUM_PART_RACERS)
    return len(winners)


def _wrong_checksum(store: "S3Store", prefix: str) -> ProbeResult:
    key = prefix + "checksum"
    digest = base64.b64encode(bytes(16)).decode()
    status = store.transfer.send_raw(
        "PUT", store.location.path(key), f"{store.uri}/{key}", b"tba", {"Content-MD5": digest}
    )
    detail = f"an upload with a wrong checksum was answered {status}, need 400"
    return ProbeResult("checksum", status == 400, detail, severity="warning")


def _race(action: Callable[[int], None], num_threads: int) -> None:
    """Run `action` in threads that start together; re-raise the first error."""
    barrier = threading.Barrier(num_threads)
    errors: list[BaseException] = []

    def run(index: int) -> None:
        barrier.wait(60)
        try:
            action(index)
        except BaseException as error:  # carried to the calling thread
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,), name=f"tba-probe-{i}") for i in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        raise error
