"""All ranks of a trainer, as rank 0 starts, watches and ends them: its own host's, and other nodes with theirs."""

import socket
import threading
import time
from collections.abc import Callable, Sequence

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from tba.contracts.errors import UserError
from tba.trainer.interfaces import use_interface_of
from tba.trainer.nodelink import listen
from tba.trainer.nodes import Nodes
from tba.trainer.rankprocesses import RankProcesses, device_of, lacking_gpus
from tba.trainer.ranks import END_SECONDS, join

LOOK_SECONDS = 0.2
NODE_TELLS_SECONDS = 2.0
"""Another node has noticed within it that it lost a rank, and said so."""
_LOCALHOST = "127.0.0.1"


class Team:
    """Rank 0 and the ranks that it has started. For the main thread, which must outlive those of this host."""

    def __init__(
        self,
        ranks: int,
        argv: Sequence[str],
        *,
        on_loss: Callable[[str], None],
        nodes: Nodes | None = None,
    ) -> None:
        """`ranks`: of each node. `argv`: what starts one. `on_loss`: called in a thread when one of this host has ended
        by itself, with words for it. `nodes`: the others, all of which have joined; null: there are none.

        Raises: UserError if this host has fewer GPUs; OSError if a process cannot be started.
        """
        self._on_loss = on_loss
        self._closing = threading.Event()
        device = device_of(0)
        if lack := lacking_gpus(ranks):
            raise UserError(lack)
        self._nodes = nodes
        size = ranks * (nodes.num_nodes if nodes is not None else 1)
        # Where all are on this host none of its names need resolve, and nobody else can connect.
        use_interface_of(nodes.own_host if nodes is not None else _LOCALHOST)
        listener = listen(0) if nodes is not None else socket.create_server((_LOCALHOST, 0))
        port = listener.getsockname()[1]
        self._store = TCPStore(_LOCALHOST, port, None, True, wait_for_workers=False, master_listen_fd=listener.detach())
        if nodes is not None:
            nodes.welcome(port)
        self._processes = RankProcesses(range(1, ranks), argv, size=size, store=(_LOCALHOST, port), first_device=1)
        self._watch = threading.Thread(target=self._watch_processes, name="ranks", daemon=True)
        self._watch.start()
        self.ranks = join(0, size, device, self._store, on_host=ranks)
        """This process among them."""

    @property
    def pids(self) -> list[int]:
        """Of the other ranks of this host."""
        return self._processes.pids

    def close(self, *, code: int, in_order: bool) -> None:
        """End all ranks, within a bounded time: `in_order` if none is within a collective; else they are killed.

        `code`: with which this process is about to end.
        """
        if not in_order:  # what broke this process may be the loss of a rank: that is what to tell
            self._watch.join(2 * LOOK_SECONDS if self._nodes is None else NODE_TELLS_SECONDS)
        self._closing.set()
        deadline = time.monotonic()
        if in_order:
            deadline += END_SECONDS
            self.ranks.close()
        if self._nodes is not None:
            self._nodes.close(code)
        self._processes.close(seconds=deadline - time.monotonic())

    def _watch_processes(self) -> None:
        while not self._closing.wait(LOOK_SECONDS):
            loss = self._processes.loss()
            if loss is not None and loss.all_raise_it:
                self._closing.wait(END_SECONDS)
            if loss is not None and not self._closing.is_set():
                self._on_loss(str(loss))
                return
