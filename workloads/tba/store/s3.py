"""A store in an S3 bucket: obstore for small requests, plain connections for large objects (transfer.py)."""

import email.utils
import itertools
import ssl
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, NotModifiedError, PreconditionError

from tba.store.access import KeySource, S3Location, connect
from tba.store.protocol import (
    MAX_CAS_BYTES,
    AlreadyExists,
    Conflict,
    NotFound,
    ObjectInfo,
    Readable,
    StoredObject,
    check_prefix,
    flat_view,
)
from tba.store.retry import Observer, Retrier, RetryPolicy, Transient, WaitListener, Weather
from tba.store.s3_errors import classify_message, error_code
from tba.store.transfer import Transfer, TransferSettings, UploadLost

if TYPE_CHECKING:
    from obstore import GetOptions, PutMode
    from obstore.store import S3Store as ObstoreS3

T = TypeVar("T")
_PRESIGNED_FOR = timedelta(hours=1)
_DELETE_BATCH = 1000
_PAGE_KEYS = 1000
_COMPARE_BYTES = 64 << 20
_UPLOAD_ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class _Link:
    """A location and the client that speaks to it: replaced as one, so that no request mixes two places."""

    location: S3Location
    client: "ObstoreS3"


class S3Store:
    """`ObjectStore` over one prefix of a bucket, whose address may change while it is used."""

    def __init__(
        self,
        location: S3Location,
        keys: KeySource,
        *,
        retry: RetryPolicy | None = None,
        settings: TransferSettings | None = None,
        observe: Observer | None = None,
        weather: Weather | None = None,
        on_wait: WaitListener | None = None,
    ) -> None:
        self.uri = location.uri
        policy = retry or RetryPolicy()
        self._settings = settings or TransferSettings()
        self._keys = keys
        self._link = _Link(location, connect(location, keys, policy))
        self._retrier = Retrier(
            policy,
            observe=observe,
            weather=weather,
            rotation=keys.rotation,
            place=lambda: self.location.endpoint or "S3",
            on_wait=on_wait,
        )
        self.transfer = Transfer(self._sign, self._retrier, self._settings, self._tls)

    @property
    def location(self) -> S3Location:
        """Where requests go now."""
        return self._link.location

    def relocate(self, location: S3Location) -> None:
        """Reach the same objects at another endpoint, or by another region, addressing style or CA.

        The next attempt of every call goes there, those that are being retried included; connections to the old place
        are closed as they fall free. Any thread may call it. Raises: UserError for a CA that is no certificate.
        """
        if location.uri != self.uri:
            raise ValueError(f"a store stays at its bucket and prefix {self.uri}, got {location.uri}")
        self._link = _Link(location, connect(location, self._keys, self._retrier.policy))

    def trial(self, location: S3Location) -> "S3Store":
        """Another store with the same keys at a location to be tried; it never insists. The caller closes it."""
        once = RetryPolicy(max_attempts=1, request_timeout_seconds=self._retrier.policy.request_timeout_seconds)
        return S3Store(location, KeySource(self._keys.provider), retry=once, settings=self._settings)

    def get(self, key: str) -> StoredObject:
        """See ObjectStore.get."""
        return self._call("get", key, lambda: self._get(key))

    def get_if_changed(self, key: str, etag: str | None) -> StoredObject | None:
        """See ObjectStore.get_if_changed."""
        if etag is None:
            return self.get(key)

        def attempt() -> StoredObject | None:
            try:
                return self._get(key, {"if_none_match": etag})
            except NotModifiedError:
                return None

        return self._call("get_if_changed", key, attempt)

    def head(self, key: str) -> ObjectInfo:
        """See ObjectStore.head."""

        def attempt() -> ObjectInfo:
            try:
                return _info(key, self._link.client.head(self.location.path(key)))
            except (BaseError, FileNotFoundError) as error:
                # A HEAD reply has no body, so it cannot tell a missing key from a missing bucket: GET can.
                if "status code: 4" in str(error):
                    self._get(key)
                raise

        return self._call("head", key, attempt)

    def put_once(self, key: str, data: Readable) -> None:
        """See ObjectStore.put_once."""
        view = flat_view(data)
        for _ in range(_UPLOAD_ATTEMPTS):
            try:
                self._create(key, view)
                return
            except UploadLost:
                if self._holds(key, view):
                    return
            except AlreadyExists:
                if self._holds(key, view):
                    return
                raise AlreadyExists(f"{self._subject(key)} exists with other bytes") from None
        raise self._retrier.give_up("put_once", self._subject(key), _UPLOAD_ATTEMPTS, UploadLost("upload vanished"))

    def cas(self, key: str, data: bytes, etag: str | None) -> str:
        """See ObjectStore.cas."""
        if len(data) > MAX_CAS_BYTES:
            raise ValueError(f"cas takes at most {MAX_CAS_BYTES} bytes, got {len(data)} for {key!r}")
        mode: PutMode = "create" if etag is None else {"e_tag": etag}
        return self._call("cas", key, lambda: self._put(key, data, mode))

    def read_into(self, key: str, target: memoryview, *, offset: int = 0) -> None:
        """See ObjectStore.read_into."""
        view = flat_view(target, writable=True)
        self.transfer.read_into(self.location.path(key), self._subject(key), view, offset)

    def list_after(self, prefix: str, after: str | None = None) -> Iterator[ObjectInfo]:
        """See ObjectStore.list_after."""
        return self._list(check_prefix(prefix), after)

    def delete(self, keys: Iterable[str]) -> None:
        """See ObjectStore.delete."""
        paths = map(self.location.path, keys)
        while batch := list(itertools.islice(paths, _DELETE_BATCH)):
            self._call("delete", "", lambda batch=batch: self._link.client.delete(batch))

    def now(self) -> float:
        """See ObjectStore.now: the `Date` header, in whole seconds."""

        def attempt() -> float:
            url = self._sign("HEAD", self.location.root or "tba", {}).split("?")[0]
            date = self.transfer.server_time(url, self.uri)
            try:
                return email.utils.parsedate_to_datetime(date).timestamp()
            except ValueError as error:
                raise Transient(f"server sent an unreadable Date header: {date!r}") from error

        return self._retrier.call("now", self.uri, attempt)

    def close(self) -> None:
        """See ObjectStore.close."""
        self.transfer.close()

    def _subject(self, key: str) -> str:
        return f"{self.uri}/{key}" if key else self.uri

    def _call(self, operation: str, key: str, action: Callable[[], T]) -> T:
        subject = self._subject(key)

        def attempt() -> T:
            try:
                return action()
            except (BaseError, FileNotFoundError) as error:  # the latter is obstore's "not found"
                raise classify_message(str(error), subject) from error

        return self._retrier.call(operation, subject, attempt)

    def _get(self, key: str, options: "GetOptions | None" = None) -> StoredObject:
        reply = self._link.client.get(self.location.path(key), options=options)
        etag = reply.meta["e_tag"]
        if not etag:
            raise Transient("server sent no etag")
        return StoredObject(bytes(reply.bytes()), etag)

    def _put(self, key: str, data: Readable, mode: "PutMode") -> str:
        """One conditional PUT. Raises: Conflict."""
        try:
            etag = self._link.client.put(self.location.path(key), data, mode=mode, use_multipart=False)["e_tag"]
        except (AlreadyExistsError, PreconditionError) as error:
            # 404 comes here too (If-Match on a missing key), and 409 for two writes in flight: only the
            # first of these is a lost race.
            text = str(error)
            if "status code: 409" in text or error_code(text) == "NoSuchBucket":
                raise classify_message(text, self._subject(key)) from error
            raise Conflict(f"{self._subject(key)} is not at the expected etag") from error
        if not etag:
            raise Transient("server sent no etag")
        return etag

    def _create(self, key: str, view: memoryview) -> None:
        if len(view) > self._settings.part_bytes:
            self.transfer.create_in_parts(self.location.path(key), self._subject(key), view)
            return
        try:
            self._call("put_once", key, lambda: self._put(key, view, "create"))
        except Conflict as error:
            raise AlreadyExists(self._subject(key)) from error

    def _holds(self, key: str, view: memoryview) -> bool:
        """Whether the stored object has exactly these bytes."""
        try:
            if self.head(key).size != len(view):
                return False
            scratch = memoryview(bytearray(min(len(view), _COMPARE_BYTES)))
            for start in range(0, len(view), _COMPARE_BYTES):
                piece = scratch[: min(_COMPARE_BYTES, len(view) - start)]
                self.read_into(key, piece, offset=start)
                if piece != view[start : start + len(piece)]:
                    return False
        except NotFound:
            return False
        return True

    def _list(self, prefix: str, after: str | None) -> Iterator[ObjectInfo]:
        """Pages are fetched one by one, each with its own retries: a failure resumes after the last key."""
        root = f"{self.location.root}/" if self.location.root else ""
        offset = root + after if after else None
        while True:
            page = self._call("list", prefix, lambda offset=offset: self._page(root + prefix, offset))
            for meta in page:
                yield _info(meta["path"].removeprefix(root), meta)
            if len(page) < _PAGE_KEYS:
                return
            offset = page[-1]["path"]

    def _page(self, prefix: str, offset: str | None) -> list["obstore.ObjectMeta"]:
        stream = self._link.client.list(prefix or None, offset=offset, chunk_size=_PAGE_KEYS)
        return list(next(iter(stream), []))

    def _sign(self, method: str, path: str, headers: Mapping[str, str]) -> str:
        """Presign; obstore signs what it can spell, botocore the rest (queries, signed headers)."""
        link = self._link
        path, _, query = path.partition("?")
        if not query and not headers and method in ("GET", "PUT", "HEAD"):
            return obstore.sign(link.client, method, path, _PRESIGNED_FOR)
        from botocore.auth import S3SigV4QueryAuth
        from botocore.awsrequest import AWSRequest
        from botocore.credentials import Credentials

        credential = self._keys()
        url = obstore.sign(link.client, "PUT", path, _PRESIGNED_FOR).split("?")[0]
        request = AWSRequest(method, f"{url}?{query}" if query else url, headers=dict(headers))
        signer = Credentials(credential["access_key_id"], credential["secret_access_key"], credential.get("token"))
        S3SigV4QueryAuth(signer, "s3", link.location.region, int(_PRESIGNED_FOR.total_seconds())).add_auth(request)
        assert request.url
        return request.url

    def _tls(self) -> ssl.SSLContext:
        context = ssl.create_default_context()
        if bundle := self.location.ca_bundle:
            context.load_verify_locations(cadata=bundle)
        return context


def _info(key: str, meta: "obstore.ObjectMeta") -> ObjectInfo:
    return ObjectInfo(key, meta["size"], meta["e_tag"] or "", meta["last_modified"].timestamp())
