"""Starts the ranks of this host: the trainer is rank 0, its children are the others, one a device.

Not torchrun: its exit code says only that some rank failed, and the trainer's says what to do (interface.md §2).
Started by torchrun, this process takes its place from torchrun's environment variables instead.
"""

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta

import torch
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from tba.contracts.errors import UserError
from tba.log import PROCESS_STARTED, RANK_ENDED, log
from tba.parent import die_with_parent
from tba.trainer.colocated import child_environment
from tba.trainer.ranks import END_SECONDS, Ranks, join

JOIN_SECONDS = 600.0
"""For all ranks to import and meet."""
LOOK_SECONDS = 0.2
_HOST = "127.0.0.1"
_STORE = "TBA_RANK_STORE_PORT"


def own_rank(variables: Mapping[str, str]) -> int:
    """This process's rank, as its parent or torchrun says; 0 where nobody does."""
    return int(variables.get("RANK", "0")) if {_STORE, "MASTER_ADDR"} & set(variables) else 0


def torchrun_size(variables: Mapping[str, str]) -> int:
    """Ranks that torchrun started, this one included; 0 without torchrun."""
    return int(variables.get("WORLD_SIZE", "0")) if "MASTER_ADDR" in variables else 0


def device_of(local_rank: int) -> torch.device:
    """The device of a rank, made current. Raises: UserError if this host has fewer GPUs."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise UserError(
            f"trainer rank {local_rank} needs a GPU of its own, got {torch.cuda.device_count()}: "
            "lower trainer.gpusPerNode or give the trainer more GPUs"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    torch.cuda.init()  # or torch.distributed chooses one
    return device


def join_as_child() -> Ranks:
    """As a rank other than 0: meet the others, and die with rank 0."""
    for number in (signal.SIGTERM, signal.SIGINT):  # rank 0 ends us, between two steps
        signal.signal(number, signal.SIG_IGN)
    rank = own_rank(os.environ)
    device = device_of(int(os.environ.get("LOCAL_RANK", rank)))
    if torchrun_size(os.environ):
        return join(rank, torchrun_size(os.environ), device)
    die_with_parent(signal.SIGKILL)
    size = int(os.environ["WORLD_SIZE"])
    store = TCPStore(_HOST, int(os.environ[_STORE]), None, False, timeout=timedelta(seconds=JOIN_SECONDS))
    return join(rank, size, device, store)


class RankProcesses:
    """Ranks 1 ... size - 1 as child processes. For the main thread, which must outlive them."""

    def __init__(self, size: int, argv: Sequence[str], *, on_loss: Callable[[str], None]) -> None:
        """`argv`: what starts a rank. `on_loss`: called in a thread when one has ended by itself, with words for it.

        Raises: UserError if this host has fewer GPUs; OSError if a process cannot be started.
        """
        self._on_loss = on_loss
        self._closing = threading.Event()
        device = device_of(0)
        if device.type == "cuda":
            device_count = torch.cuda.device_count()
            if device_count < size:
                raise UserError(f"trainer.gpusPerNode is {size}, got {device_count} GPUs here: lower it")
        # All on this host: none of its names need resolve, and nobody else can connect.
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, "lo")
        listener = socket.create_server((_HOST, 0))
        port = listener.getsockname()[1]
        self._store = TCPStore(_HOST, port, None, True, wait_for_workers=False, master_listen_fd=listener.detach())
        self._children = [self._start(rank, size, port, argv) for rank in range(1, size)]
        self._watch = threading.Thread(target=self._watch_children, name="ranks", daemon=True)
        self._watch.start()
        self.ranks = join(0, size, device, self._store)
        """This process among them."""

    @property
    def pids(self) -> list[int]:
        """Of ranks 1, 2, ..."""
        return [child.pid for child in self._children]

    def close(self, *, in_order: bool) -> None:
        """End all ranks, within a bounded time: `in_order` if none is within a collective; else they are killed."""
        if not in_order:  # what broke this process may be the loss of a rank: that is what to tell
            self._watch.join(2 * LOOK_SECONDS)
        self._closing.set()
        deadline = time.monotonic()
        if in_order:
            deadline += END_SECONDS
            self.ranks.close()
        for child in self._children:
            try:
                child.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
                with suppress(subprocess.TimeoutExpired):  # a driver may hold it for ever
                    child.wait(END_SECONDS)

    def _start(self, rank: int, size: int, port: int, argv: Sequence[str]) -> "subprocess.Popen[bytes]":
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), _STORE: str(port)}
        child = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, start_new_session=True, env={**child_environment(os.environ), **own}
        )
        log.info(PROCESS_STARTED, rank=rank, pid=child.pid)
        return child

    def _watch_children(self) -> None:
        while not self._closing.wait(LOOK_SECONDS):
            for rank, child in enumerate(self._children, start=1):
                code = child.poll()
                if code == UserError.exit_code:  # all ranks raise it: this process tells it, with its own exit code
                    self._closing.wait(END_SECONDS)
                if code is not None and not self._closing.is_set():
                    told = f"code {code}" if code >= 0 else signal.Signals(-code).name
                    log.error(RANK_ENDED, rank=rank, reason=told)
                    self._on_loss(f"trainer rank {rank} ended with {told}: see its log; the run resumes from the "
                                  "newest checkpoint")  # fmt: skip
                    return
