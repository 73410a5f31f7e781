"""Large objects over plain HTTP connections: no copy between the socket and the caller's memory.

    read:   ranges of 16 MiB × 8 threads, each a presigned GET, recv() straight into the target
    write:  CreateMultipartUpload → parts × 8 threads, sent from the source → CompleteMultipartUpload
            with If-None-Match, so that a large object too never replaces an earlier one
            (writers that complete at the same moment: see ObjectStore.put_once)

obstore has neither: its reads land in Rust memory first, and its conditional put is one request.
Source: measurements in shared/reference/s3.md §2.
"""

import base64
import contextlib
import hashlib
import http.client
import queue
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import quote, urlsplit

from tba.contracts.errors import CorruptObject, StoreUnavailable, UserError
from tba.store.protocol import AlreadyExists, NotFound
from tba.store.retry import Retrier, Transient
from tba.store.s3_errors import classify, classify_broken, error_code

T = TypeVar("T")
Signer = Callable[[str, str, Mapping[str, str]], str]
"""(method, key within the bucket with an optional query, headers to sign) -> presigned URL."""

_SLICE_BYTES = 1 << 20
# A peer slower than this for a whole part counts as stalled.
_MIN_BYTES_PER_SECOND = 64 << 10
_MIN_PART_BYTES = 5 << 20
_MAX_PARTS = 9000


@dataclass(frozen=True, slots=True)
class TransferSettings:
    """Part size in bytes and the number of parts in flight."""

    part_bytes: int = 16 << 20
    num_threads: int = 8


class UploadLost(Exception):
    """The server no longer knows the upload: it was completed by a lost request, or aborted."""


@dataclass(frozen=True, slots=True)
class _Reply:
    status: int
    headers: Mapping[str, str]
    body: bytes


class Transfer:
    """Connections and threads of one store; thread-safe."""

    def __init__(
        self, sign: Signer, retrier: Retrier, settings: TransferSettings, tls: Callable[[], ssl.SSLContext]
    ) -> None:
        self._sign = sign
        self._retrier = retrier
        self._settings = settings
        self._tls = tls
        self._idle: queue.SimpleQueue[tuple[str, http.client.HTTPConnection]] = queue.SimpleQueue()
        self._threads = ThreadPoolExecutor(settings.num_threads, thread_name_prefix="tba-s3-transfer")

    def close(self) -> None:
        """Join the threads and close idle connections."""
        self._threads.shutdown(wait=True)
        self._drop_idle()

    def read_into(self, path: str, subject: str, target: memoryview, offset: int) -> None:
        """Fill `target` from byte `offset` of the object. Raises: NotFound, CorruptObject if it is too short."""

        def read(start: int, part: memoryview) -> None:
            def attempt() -> None:
                self._read_range(path, subject, part, offset + start)

            self._retrier.call("read_into", subject, attempt)

        self._in_parallel(read, list(_parts(target, self._settings.part_bytes)))

    def create_in_parts(self, path: str, subject: str, source: memoryview) -> None:
        """Upload once. Raises: AlreadyExists; UploadLost if the outcome must be read back."""
        upload_id = self._retrier.call("put_once", subject, lambda: self._start(path, subject))
        etags: dict[int, str] = {}
        part_bytes = max(self._settings.part_bytes, _MIN_PART_BYTES, -(-len(source) // _MAX_PARTS))

        def send(start: int, part: memoryview) -> None:
            number = start // part_bytes + 1
            etags[number] = self._retrier.call(
                "put_once", subject, lambda: self._send_part(path, subject, upload_id, number, part)
            )

        try:
            self._in_parallel(send, list(_parts(source, part_bytes)))
            self._retrier.call("put_once", subject, lambda: self._complete(path, subject, upload_id, etags))
        except BaseException:
            # Best effort, even on Ctrl-C: parts cost money until the bucket's lifecycle removes them.
            with contextlib.suppress(Transient, UserError, NotFound):
                self._request("DELETE", f"{path}?uploadId={quote(upload_id, safe='')}", subject)
            raise

    def server_time(self, url: str, subject: str) -> str:
        """The `Date` header of any reply of the server, even of a refusal."""
        with self._replying(subject), self._connection(url) as connection:
            connection.request("HEAD", _target(url))
            reply = connection.getresponse()
            reply.read()
            date = reply.headers.get("Date")
        if not date:
            raise Transient(f"server sent no Date header for {subject}")
        return date

    def send_raw(self, method: str, path: str, subject: str, body: bytes, headers: Mapping[str, str]) -> int:
        """One signed request, for the probe. Returns the HTTP status, whatever it is."""
        return self._retrier.call(
            "put_once", subject, lambda: self._exchange(method, path, subject, memoryview(body), headers).status
        )

    def _start(self, path: str, subject: str) -> str:
        reply = self._request("POST", f"{path}?uploads=", subject)
        found = re.search(rb"<UploadId>([^<]+)</UploadId>", reply.body)
        if not found:
            raise Transient(f"server gave no upload id for {subject}")
        return found[1].decode()

    def _send_part(self, path: str, subject: str, upload_id: str, number: int, part: memoryview) -> str:
        target = f"{path}?partNumber={number}&uploadId={quote(upload_id, safe='')}"
        try:
            etag = self._request("PUT", target, subject, part).headers.get("etag")
        except NotFound as error:
            raise UploadLost(f"{subject}: part {number} belongs to no upload") from error
        if not etag:
            raise Transient(f"server gave no etag for part {number} of {subject}")
        return etag

    def _complete(self, path: str, subject: str, upload_id: str, etags: Mapping[int, str]) -> None:
        parts = "".join(f"<Part><PartNumber>{n}</PartNumber><ETag>{etags[n]}</ETag></Part>" for n in sorted(etags))
        namespace = "http://s3.amazonaws.com/doc/2006-03-01/"
        body = f'<CompleteMultipartUpload xmlns="{namespace}">{parts}</CompleteMultipartUpload>'.encode()
        target = f"{path}?uploadId={quote(upload_id, safe='')}"
        reply = self._exchange("POST", target, subject, memoryview(body), {"If-None-Match": "*"})
        text = reply.body.decode(errors="replace")
        # S3 may answer 200 at once and put the failure into the body, after blanks that keep the line alive.
        code = error_code(text) if "<Error>" in text else None
        if reply.status == 412 or code == "PreconditionFailed":
            raise AlreadyExists(subject)
        if code == "NoSuchUpload" or reply.status == 409:
            raise UploadLost(f"{subject}: {reply.status} {code}")
        if code:
            raise classify(reply.status if reply.status >= 300 else 500, text, subject)
        if reply.status >= 300:
            raise classify(reply.status, text, subject)

    def _request(self, method: str, path: str, subject: str, body: memoryview | None = None) -> _Reply:
        reply = self._exchange(method, path, subject, body, {})
        if reply.status >= 300:
            raise classify(reply.status, reply.body.decode(errors="replace"), subject)
        return reply

    def _exchange(
        self, method: str, path: str, subject: str, body: memoryview | None, headers: Mapping[str, str]
    ) -> _Reply:
        url = self._sign(method, path, headers)
        size = body.nbytes if body is not None else 0
        extra = dict(headers)
        if size and url.startswith("http://") and "Content-MD5" not in extra:
            # TLS detects damage in transit; without it the server must.
            extra["Content-MD5"] = base64.b64encode(hashlib.md5(body or b"", usedforsecurity=False).digest()).decode()
        with self._replying(subject), self._connection(url, transfer_bytes=size) as connection:
            connection.request(method, _target(url), body=body, headers=extra)
            reply = connection.getresponse()
            return _Reply(reply.status, {k.lower(): v for k, v in reply.headers.items()}, reply.read())

    def _read_range(self, path: str, subject: str, part: memoryview, start: int) -> None:
        url = self._sign("GET", path, {})
        deadline = time.monotonic() + self._patience(len(part))
        with self._replying(subject), self._connection(url) as connection:
            connection.request("GET", _target(url), headers={"Range": f"bytes={start}-{start + len(part) - 1}"})
            reply = connection.getresponse()
            if reply.status == 416:
                reply.read()
                raise CorruptObject(f"{subject} ends before byte {start}")
            if reply.status == 200:
                raise UserError(f"{subject}: server answered 200 to a Range request; use a store that serves ranges")
            if reply.status != 206:
                raise classify(reply.status, reply.read(65536).decode(errors="replace"), subject)
            self._check_range(reply, subject, start, len(part))
            done = 0
            while done < len(part):
                count = reply.readinto(part[done : done + _SLICE_BYTES])
                if count == 0:
                    raise Transient(f"connection ended {len(part) - done} bytes early")
                done += count
                if time.monotonic() > deadline:
                    raise Transient(f"{len(part)} bytes took longer than {self._patience(len(part)):.0f} s")
            reply.read()

    @staticmethod
    def _check_range(reply: http.client.HTTPResponse, subject: str, start: int, size: int) -> None:
        found = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+|\*)", reply.headers.get("Content-Range", ""))
        if not found or int(found[1]) != start:
            raise Transient(f"server answered the wrong range of {subject}: {reply.headers.get('Content-Range')}")
        if int(found[2]) != start + size - 1:
            raise CorruptObject(f"{subject} has {found[3]} bytes, need {start}..{start + size}")

    def _patience(self, transfer_bytes: int) -> float:
        return self._retrier.policy.request_timeout_seconds + transfer_bytes / _MIN_BYTES_PER_SECOND

    @contextlib.contextmanager
    def _replying(self, subject: str) -> Iterator[None]:
        """Turn a broken connection into the error that says whether to try again."""
        try:
            yield
        except (OSError, http.client.HTTPException) as error:
            raise classify_broken(f"{type(error).__name__}: {error}", subject) from error

    @contextlib.contextmanager
    def _connection(self, url: str, *, transfer_bytes: int = 0) -> Iterator[http.client.HTTPConnection]:
        """An idle or new connection, kept for the next request only if this one ended well."""
        connection = self._idle_to(_server(url)) or self._connect(url)
        if connection.sock:
            # sendall() counts the whole body against the time limit; recv() each piece.
            connection.sock.settimeout(self._patience(transfer_bytes))
        try:
            yield connection
        except BaseException:
            connection.close()
            # What broke this one (a restarted server, say) has likely broken those that wait.
            self._drop_idle()
            raise
        if connection.sock is not None:
            self._idle.put((_server(url), connection))

    def _idle_to(self, server: str) -> http.client.HTTPConnection | None:
        """Those to a server of before are closed: the store has moved."""
        with contextlib.suppress(queue.Empty):
            while True:
                where, connection = self._idle.get_nowait()
                if where == server:
                    return connection
                connection.close()
        return None

    def _drop_idle(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._idle.get_nowait()[1].close()

    def _connect(self, url: str) -> http.client.HTTPConnection:
        parts = urlsplit(url)
        assert parts.hostname
        limit = self._retrier.policy.connect_timeout_seconds
        if parts.scheme == "https":
            connection = http.client.HTTPSConnection(parts.hostname, parts.port, timeout=limit, context=self._tls())
        else:
            connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=limit)
        with self._replying(url.split("?")[0]):
            connection.connect()
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def _in_parallel(self, work: Callable[[int, memoryview], None], parts: Sequence[tuple[int, memoryview]]) -> None:
        """Do all parts, or stop at the first failure; returns only when no thread touches the memory any more."""
        if len(parts) <= 1:
            for part in parts:
                work(*part)
            return
        stop = threading.Event()

        def guarded(start: int, part: memoryview) -> None:
            if stop.is_set():
                return
            try:
                work(start, part)
            except BaseException:
                stop.set()
                raise

        futures = [self._threads.submit(guarded, *part) for part in parts]
        _wait_for_all(futures, stop)


def _wait_for_all(futures: Sequence[Future[None]], stop: threading.Event) -> None:
    errors: list[BaseException] = []
    try:
        errors = [error for error in (future.exception() for future in futures) if error]
    except BaseException:
        # Ctrl-C while waiting: no new part starts, and those in flight end before the buffer is given up.
        stop.set()
        for future in futures:
            future.exception()
        raise
    # A refusal says more than the give-up of a sibling.
    for error in sorted(errors, key=lambda error: isinstance(error, StoreUnavailable)):
        raise error


def _parts(view: memoryview, size: int) -> Iterator[tuple[int, memoryview]]:
    for start in range(0, len(view), size):
        yield start, view[start : start + size]


def _server(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"


def _target(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.path}?{parts.query}" if parts.query else parts.path
