"""One connection between rank 0 and another node: lines of JSON, after both have shown that they know the token.

```
rank 0 ◄────────────────── TCP ────────────────── node
       ── challenge ─────────────────────────────►
       ◄─ who it is, proof of that, challenge ────
       ── proof ─────────────────────────────────►
       ◄──────────────── messages ───────────────►     until one of them ends, which breaks the connection
```
A proof is an HMAC-SHA256 under the token, which itself never travels.
"""

import hashlib
import hmac
import ipaddress
import json
import secrets
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any

GREETING_SECONDS = 10.0
"""Each side may take so long for its part of a greeting: a stranger that says nothing is dropped then."""
_MAX_BYTES = 65536
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4))
"""A host that lost its power says nothing: after 30 s without an answer the connection is broken."""
_USER_TIMEOUT_MILLISECONDS = 30_000


class Refused(ConnectionError):
    """The other side does not know the token, or does not speak of ranks at all."""


@dataclass(frozen=True, slots=True)
class Hello:
    """What a node says of itself."""

    node_rank: int
    nodes: int
    ranks: int
    """A node."""
    refusal: str = ""
    """Why it cannot take part, which is the user's mistake."""


class Link:
    """Sends and receives messages, each a small mapping that JSON can hold. One thread may send while one receives."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._lines = connection.makefile("rb")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _USER_TIMEOUT_MILLISECONDS)
        self.own_host = host_of(connection.getsockname())
        """Address by which the other side reaches this one."""
        self.peer_host = host_of(connection.getpeername())

    @classmethod
    def accept(cls, connection: socket.socket, token: str) -> "tuple[Link, Hello]":
        """As rank 0: greet whoever connected. Raises: Refused, OSError; the connection is closed then."""
        with _greeting(connection) as link:
            return link, link._ask(token)

    @classmethod
    def connect(cls, host: str, port: int, token: str, hello: Hello) -> "Link":
        """As a node: greet rank 0. Raises: Refused, OSError."""
        connection = socket.create_connection((host, port), timeout=GREETING_SECONDS)
        with _greeting(connection) as link:
            link._introduce(token, hello)
            return link

    def send(self, message: Mapping[str, Any]) -> None:
        """Raises: OSError if the other side has gone."""
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> dict[str, Any]:
        """The next message. Raises: OSError if the other side has gone."""
        line = self._lines.readline(_MAX_BYTES)
        if not line.endswith(b"\n"):
            raise ConnectionError("the connection was closed")
        try:
            message = json.loads(line)
        except ValueError as error:
            raise Refused("what was sent is no message") from error
        if not isinstance(message, dict):
            raise Refused("what was sent is no message")
        return message

    def close(self) -> None:
        """Break the connection; a `receive` that waits in another thread raises."""
        with suppress(OSError):  # it is broken already
            self._socket.shutdown(socket.SHUT_RDWR)
        self._lines.close()
        self._socket.close()

    def _ask(self, token: str) -> Hello:
        challenge = secrets.token_hex(32)
        self.send({"challenge": challenge})
        answer = self.receive()
        told = str(answer.get("hello"))
        _require(answer, token, "node", challenge, told)
        self.send({"proof": _proof(token, "rank 0", str(answer.get("challenge")))})
        try:
            return Hello(**json.loads(told))
        except (TypeError, ValueError) as error:
            raise Refused("the other side is of another release") from error

    def _introduce(self, token: str, hello: Hello) -> None:
        asked, challenge = self.receive(), secrets.token_hex(32)
        told = json.dumps(asdict(hello))
        proof = _proof(token, "node", str(asked.get("challenge")), told)
        self.send({"hello": told, "proof": proof, "challenge": challenge})
        _require(self.receive(), token, "rank 0", challenge)


def listen(port: int) -> socket.socket:
    """On all interfaces. Raises: OSError if the port is taken."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


@contextmanager
def _greeting(connection: socket.socket) -> Iterator[Link]:
    """Within it each message has `GREETING_SECONDS`; afterwards the link waits as long as it takes."""
    try:
        connection.settimeout(GREETING_SECONDS)
        yield Link(connection)
        connection.settimeout(None)
    except BaseException:
        connection.close()
        raise


def _proof(token: str, *parts: str) -> str:
    return hmac.new(token.encode(), json.dumps(parts).encode(), hashlib.sha256).hexdigest()


def _require(message: Mapping[str, Any], token: str, *parts: str) -> None:
    if not hmac.compare_digest(str(message.get("proof")).encode(), _proof(token, *parts).encode()):
        raise Refused("the other side has another token")


def host_of(address: tuple[Any, ...]) -> str:
    """Of a socket's address; an IPv4 one as such, also on a socket of both families."""
    host = ipaddress.ip_address(str(address[0]).partition("%")[0])
    mapped = getattr(host, "ipv4_mapped", None)
    return str(mapped or host)
