"""The trainer's process on another node than rank 0's: it joins, starts this node's ranks, and ends as rank 0 does.

It computes nothing and reads no storage: its ranks are its children (`rank`). What it says travels over one connection
(`nodelink`), and the end of that is the end of rank 0.
"""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from tba.contracts.errors import Fenced, LeftAlone, StoreUnavailable, UserError
from tba.log import NODE_JOINED, NODES_AWAITED, SIGNAL_RECEIVED, log
from tba.trainer.interfaces import use_interface_of
from tba.trainer.nodelink import Hello, Link
from tba.trainer.rankprocesses import RankProcesses
from tba.trainer.ranks import END_SECONDS

LOOK_SECONDS = 0.2
RETRY_SECONDS = 1.0
TELL_SECONDS = 30.0
_SHARED = frozenset({0, StoreUnavailable.exit_code, Fenced.exit_code, UserError.exit_code})
"""Exit codes of rank 0 that all nodes end with; any other is held against rank 0 alone."""


class Node:
    """For the main thread."""

    def __init__(
        self,
        hello: Hello,
        rendezvous: tuple[str, int],
        token: str,
        argv: Sequence[str],
        *,
        stopping: Callable[[], bool],
    ) -> None:
        """`rendezvous`: host and port of rank 0. `argv`: what starts a rank. `stopping`: whether SIGTERM came."""
        self._hello, self._rendezvous, self._token, self._argv = hello, rendezvous, token, argv
        self._stopping = stopping
        self._messages: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self.state = "waits for rank 0"
        """In words."""
        self.trains = False
        """Whether its ranks have been started."""

    def run(self, *, join_seconds: float) -> int:
        """Returns rank 0's exit code where that is one for all (0, 2, 3, 64); else 143, as if it had been stopped.

        Raises: LeftAlone if rank 0 has not come within `join_seconds`, or goes without a word.
        """
        deadline = time.monotonic() + join_seconds
        while not self._stopping():
            link = self._connect(deadline)
            if link is None:
                break
            message = self._next()
            if message is not None and "store" in message:
                return _code(self._train(link, int(message["store"])))
            link.close()
            if message is not None:
                return _code(message.get("end"))
            log.warning(NODES_AWAITED, missing=[0], detail="rank 0 has gone before all nodes had joined")
            time.sleep(RETRY_SECONDS)
        return LeftAlone.exit_code

    def _connect(self, deadline: float) -> Link | None:
        """A greeted link, whose messages arrive in the queue; null: asked to stop. Raises: LeftAlone."""
        told, host, port = float("-inf"), *self._rendezvous
        while not self._stopping():
            try:
                link = Link.connect(host, port, self._token, self._hello)
            except OSError as error:  # its name does not resolve yet, it does not listen yet, or it is somebody else
                now = time.monotonic()
                if now > deadline:
                    raise LeftAlone(
                        f"trainer node 0 did not come to {host}:{port}: {error}. See why its pod or process does not "
                        "run, and whether this node reaches it"
                    ) from error
                if now - told >= TELL_SECONDS:
                    told = now
                    log.info(NODES_AWAITED, missing=[0], nodes=self._hello.nodes, detail=f"{host}:{port}: {error}")
                time.sleep(RETRY_SECONDS)
                continue
            self.state = "waits for the other nodes"
            self._messages = queue.SimpleQueue()
            threading.Thread(target=_receive, args=(link, self._messages), name="rank-0", daemon=True).start()
            log.info(NODE_JOINED, node=self._hello.node_rank, peer=link.peer_host)
            return link
        return None

    def _next(self) -> dict[str, Any] | None:
        """The first message; null: rank 0 has gone, as it does when others never come, or this node is to stop."""
        while not self._stopping():
            with suppress(queue.Empty):
                return self._messages.get(timeout=LOOK_SECONDS)
        return None

    def _train(self, link: Link, store_port: int) -> int | None:
        """Rank 0's exit code; null: it ended without a word after it was told of a loss. Raises: LeftAlone."""
        use_interface_of(link.own_host)
        first, count = self._hello.node_rank * self._hello.ranks, self._hello.ranks
        processes = RankProcesses(
            range(first, first + count),
            self._argv,
            size=self._hello.nodes * count,
            store=(link.peer_host, store_port),
        )
        self.state, self.trains = "trains", True
        seconds = 0.0
        try:
            code = self._until_the_end(link, processes)
            seconds = END_SECONDS if code in (0, LeftAlone.exit_code) else 0.0
            return code
        finally:
            processes.close(seconds=seconds)
            link.close()

    def _until_the_end(self, link: Link, processes: RankProcesses) -> int | None:
        told_of_stop, lost_at = False, None
        while True:
            with suppress(queue.Empty):
                message = self._messages.get(timeout=LOOK_SECONDS)
                if message is not None:
                    return int(message["end"])
                if lost_at is not None:
                    return None
                raise LeftAlone("rank 0 has gone without a word: see the log of node 0; its end is what counts")
            if self._stopping() and not told_of_stop:
                told_of_stop = True
                log.info(SIGNAL_RECEIVED, detail="asked to end: rank 0 writes a checkpoint first and ends this node")
                _send(link, {"leave": True})
            if lost_at is None and (loss := processes.loss()) is not None:
                lost_at = time.monotonic()
                if not loss.all_raise_it:
                    _send(link, {"lost": f"{loss} (node {self._hello.node_rank})"})
            if lost_at is not None and time.monotonic() - lost_at > END_SECONDS:
                raise LeftAlone(
                    f"trainer rank of node {self._hello.node_rank} has ended, and rank 0 does not say how to end"
                )


def _code(code: int | None) -> int:
    return code if code in _SHARED else LeftAlone.exit_code


def _send(link: Link, message: dict[str, Any]) -> None:
    with suppress(OSError):  # the thread that receives notices
        link.send(message)


def _receive(link: Link, messages: "queue.SimpleQueue[dict[str, Any] | None]") -> None:
    """Null when rank 0 has gone."""
    try:
        while True:
            messages.put(link.receive())
    except (OSError, ValueError):  # a file that was closed meanwhile
        messages.put(None)
