"""The other nodes of a trainer, as rank 0 sees them: they join, say when they are to leave, and end with it.

```
listening ── a node connects, greets ──► joined ── all are here: welcome, where the store is ──► training ── end(code)
                    ▲                       │                                                        │
                    └── it went before that ┘                     it has lost a rank, or its connection breaks: on_loss
```
"""

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from tba.contracts.errors import RanksMissing, UserError
from tba.log import NODE_JOINED, NODE_LEFT, NODE_REFUSED, NODES_AWAITED, RANK_ENDED, log
from tba.trainer.nodelink import Hello, Link, host_of, listen

LOOK_SECONDS = 0.2
TELL_SECONDS = 30.0
"""How often it is logged who is waited for."""


class Nodes:
    """Nodes 1 ... num_nodes - 1. Listens from its creation on until all have joined."""

    def __init__(
        self,
        num_nodes: int,
        ranks: int,
        *,
        port: int,
        token: str,
        on_leave: Callable[[int], None],
        on_loss: Callable[[str], None],
    ) -> None:
        """`ranks`: of a node. Called in a thread: `on_leave` with a node that is asked to end and waits for rank 0 to
        end in order; `on_loss` with words, when a node or a rank of it has gone after all had joined.

        Raises: OSError if the port is taken.
        """
        self.num_nodes, self._ranks, self._token = num_nodes, ranks, token
        self._on_leave, self._on_loss = on_leave, on_loss
        self._links: dict[int, Link] = {}
        self._refusal = ""
        self._complete = self._closing = False
        self._lock = threading.Lock()
        self._listener = listen(port)
        threading.Thread(target=self._accept, name="nodes", daemon=True).start()

    def gather(self, *, seconds: float, stopping: Callable[[], bool]) -> bool:
        """Wait until all nodes have joined; False if `stopping` says so first.

        Raises: UserError if one cannot take part; RanksMissing if one has not come after so long.
        """
        began = time.monotonic()
        told = began - TELL_SECONDS
        while True:
            missing, now = self._missing(), time.monotonic()
            if self._refusal:
                raise UserError(self._refusal)
            if not missing:
                return True
            if stopping():
                return False
            if now - began > seconds:
                raise RanksMissing(
                    f"trainer nodes {missing} of {self.num_nodes} did not come within {seconds:.0f} s: see why their "
                    "pods or processes do not run, and whether they reach this one"
                )
            if now - told >= TELL_SECONDS:
                told = now
                log.info(NODES_AWAITED, missing=missing, nodes=self.num_nodes, waited_seconds=round(now - began))
            time.sleep(LOOK_SECONDS)

    @property
    def own_host(self) -> str:
        """Address by which the others reach this node."""
        return next(iter(self._links.values())).own_host

    def welcome(self, store_port: int) -> None:
        """Have all nodes start their ranks, which meet at this port of this node."""
        for link in self._links.values():
            with suppress(OSError):  # `_follow` tells
                link.send({"store": store_port})

    def close(self, code: int) -> None:
        """Have all nodes end as this process does, with exit code `code`."""
        self._closing = True
        self._stop_listening()
        for link in self._links.values():
            with suppress(OSError):
                link.send({"end": code})

    def _missing(self) -> list[int]:
        """Those that have not joined. Once there are none, who goes is lost and none is let in."""
        with self._lock:
            missing = [node for node in range(1, self.num_nodes) if node not in self._links]
            self._complete = not missing
        if not missing:
            self._stop_listening()
        return missing

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._greet, args=(connection,), name="node", daemon=True).start()

    def _greet(self, connection: socket.socket) -> None:
        peer = host_of(connection.getpeername())
        try:
            link, hello = Link.accept(connection, self._token)
        except OSError as error:
            log.warning(NODE_REFUSED, peer=peer, reason=str(error))
            return
        if self._admit(link, hello):
            log.info(NODE_JOINED, node=hello.node_rank, peer=peer)
            self._follow(hello.node_rank, link)
        link.close()

    def _admit(self, link: Link, hello: Hello) -> bool:
        with self._lock:
            if self._complete or self._closing:
                return False
            self._refusal = self._refusal or self._mistake(hello)
            before = self._links.pop(hello.node_rank, None)
            self._links[hello.node_rank] = link
        if before is not None:  # its host lost power, or it was started twice: who comes last is there
            before.close()
        return True

    def _mistake(self, hello: Hello) -> str:
        own, theirs = (self.num_nodes, self._ranks), (hello.nodes, hello.ranks)
        if own != theirs or not 0 < hello.node_rank < self.num_nodes:
            return (
                f"trainer node {hello.node_rank} was started for {theirs[0]} nodes of {theirs[1]} ranks, node 0 for "
                f"{own[0]} of {own[1]}: give all the same --nodes and --ranks, and each a --node-rank of its own"
            )
        return f"trainer node {hello.node_rank}: {hello.refusal}" if hello.refusal else ""

    def _follow(self, node: int, link: Link) -> None:
        try:
            while True:
                message = link.receive()
                if "leave" in message:
                    log.info(NODE_LEFT, node=node, reason="it was asked to end: this trainer ends in order")
                    self._on_leave(node)
                if "lost" in message and not self._closing:
                    log.error(RANK_ENDED, node=node, reason=message["lost"])
                    self._on_loss(str(message["lost"]))
        except OSError as error:
            self._gone(node, link, error)

    def _gone(self, node: int, link: Link, error: OSError) -> None:
        with self._lock:
            if self._closing or self._links.get(node) is not link:
                return
            if not self._complete:
                del self._links[node]
        log.warning(NODE_LEFT, node=node, reason=str(error))
        if self._complete:
            self._on_loss(f"trainer node {node} is gone ({error}): see its log; the run resumes from the newest "
                          "checkpoint")  # fmt: skip

    def _stop_listening(self) -> None:
        with suppress(OSError):  # wakes the thread that accepts
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
