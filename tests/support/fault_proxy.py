"""A small HTTP/1.1 proxy in front of an S3 server that fails on purpose, by seeded rules.

    client -> FaultProxy -> server        with FaultProxy(server.endpoint) as proxy:
                 |                            proxy.add("lost_reply", method="PUT", times=1)
       error, reset, lost_reply,              store = open_store(uri, endpoint=proxy.endpoint)
       truncate, stall

The `Host` header passes unchanged, so request signatures stay valid.
"""

import contextlib
import random
import re
import socket
import ssl
import threading
from collections import Counter
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self
from urllib.parse import urlsplit

Kind = Literal["error", "reset", "lost_reply", "truncate", "stall"]
_NO_BODY = {204, 304}


@dataclass(slots=True)
class Rule:
    """What to break: the first rule whose method and path match and whose dice fall decides."""

    kind: Kind
    rate: float
    times: int | None
    method: str | None
    path: re.Pattern[str]
    status: int


@dataclass(frozen=True, slots=True)
class _Message:
    head: bytes
    body: bytes

    @property
    def first_line(self) -> list[str]:
        return self.head.split(b"\r\n", 1)[0].decode("latin-1").split(" ")

    @property
    def raw(self) -> bytes:
        return self.head + self.body


class FaultProxy:
    """Context manager; `.endpoint` is where clients go, `.injected` counts faults by kind."""

    def __init__(self, upstream: str, *, seed: int = 0, tls: ssl.SSLContext | None = None) -> None:
        """`tls`: of a server whose certificate clients see; what is loaded into it later counts from then on."""
        parts = urlsplit(upstream)
        assert parts.hostname and parts.port
        self._upstream = (parts.hostname, parts.port)
        self._tls = tls
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._rules: list[Rule] = []
        self._sockets: set[socket.socket] = set()
        self._closing = threading.Event()
        self.injected: Counter[str] = Counter()
        self.requests: Counter[str] = Counter()  # by method
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.endpoint = f"{'https' if tls else 'http'}://127.0.0.1:{self._listener.getsockname()[1]}"
        self._acceptor = threading.Thread(target=self._accept, daemon=True)
        self._acceptor.start()

    def add(
        self,
        kind: Kind,
        *,
        rate: float = 1.0,
        times: int | None = None,
        method: str | None = None,
        path: str = "",
        status: int = 503,
    ) -> None:
        """Break requests of `method` whose target matches regex `path` with probability `rate`, at most `times`."""
        with self._lock:
            self._rules.append(Rule(kind, rate, times, method, re.compile(path), status))

    def clear(self) -> None:
        """Behave from now on."""
        with self._lock:
            self._rules.clear()

    def close(self) -> None:
        """Drop every connection and stop listening."""
        self._closing.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            sockets = list(self._sockets)
        for each in sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self._acceptor.join(5)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        server: socket.socket | None = None
        with self._lock:
            self._sockets.add(client)
        try:
            if self._tls is not None:
                client = self._tls.wrap_socket(client, server_side=True)
            reader = client.makefile("rb")
            while not self._closing.is_set() and (request := _read_message(reader, request_method=None)):
                method, target = request.first_line[:2]
                fault = self._fault(method, target)
                if fault and not self._before(client, fault, method):
                    return
                if fault and fault.kind == "error":
                    continue
                if server is None:
                    server = socket.create_connection(self._upstream, timeout=60)
                server.sendall(request.raw)
                reply = _read_message(server.makefile("rb"), request_method=method)
                if reply is None or (fault and not self._after(client, fault, reply)):
                    return
                client.sendall(reply.raw)
        except OSError:
            pass
        finally:
            with self._lock:
                self._sockets.discard(client)
            client.close()
            if server:
                server.close()

    def _fault(self, method: str, target: str) -> Rule | None:
        with self._lock:
            self.requests[method] += 1
            for rule in self._rules:
                if rule.times == 0 or rule.method not in (None, method) or not rule.path.search(target):
                    continue
                if self._random.random() >= rule.rate:
                    continue
                if rule.times is not None:
                    rule.times -= 1
                self.injected[rule.kind] += 1
                return rule
        return None

    def _before(self, client: socket.socket, fault: Rule, method: str) -> bool:
        """Faults that never reach the server. Returns False if the connection is done for."""
        if fault.kind == "reset":
            _reset(client)
            return False
        if fault.kind == "stall":
            self._closing.wait(60)
            return False
        if fault.kind == "error":
            code = {500: "InternalError", 503: "SlowDown"}.get(fault.status, "InjectedError")
            body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>injected</Message></Error>".encode()
            head = f"HTTP/1.1 {fault.status} Injected\r\nContent-Length: {len(body)}\r\n\r\n"
            client.sendall(head.encode() + (b"" if method == "HEAD" else body))
        return True

    def _after(self, client: socket.socket, fault: Rule, reply: _Message) -> bool:
        """Faults that come once the server has done its work. Returns False if the connection is done for."""
        if fault.kind == "truncate":
            client.sendall(reply.head + reply.body[: len(reply.body) // 2])
        _reset(client)
        return False


def _reset(client: socket.socket) -> None:
    # SO_LINGER 0 turns close() into RST: the client sees "connection reset", not a clean end.
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    client.shutdown(socket.SHUT_RD)


def _read_message(reader, *, request_method: str | None) -> _Message | None:
    """One request (`request_method` None) or the reply to such a request; None at end of stream."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        line = reader.readline()
        if not line:
            return None
        head += line
    message = _Message(head, b"")
    if request_method is not None:
        status = int(message.first_line[1])
        if 100 <= status < 200:
            return _read_message(reader, request_method=request_method)
        if request_method == "HEAD" or status in _NO_BODY:
            return message
    if re.search(rb"\r\ntransfer-encoding:[^\r]*chunked", head, re.IGNORECASE):
        return _Message(head, _read_chunked(reader))
    length = re.search(rb"\r\ncontent-length: *(\d+)", head, re.IGNORECASE)
    if length:
        return _Message(head, reader.read(int(length[1])))
    # Neither: a request has no body then, a reply lasts until the connection ends.
    return message if request_method is None else _Message(head, reader.read())


def _read_chunked(reader) -> bytes:
    body = b""
    while True:
        line = reader.readline()
        body += line
        size = int(line.split(b";")[0], 16)
        body += reader.read(size + 2)
        if size == 0:
            return body
