"""Starts ranks on this host as child processes, one a device, and notices the end of one.

Not torchrun: its exit code says only that some rank failed, and the trainer's says what to do (interface.md §2).
Started by torchrun, this process takes its place from torchrun's environment variables instead.
"""

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
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
_STORE = "TBA_RANK_STORE"
"""Environment variable: HOST PORT."""


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


def lacking_gpus(ranks: int) -> str:
    """Why so many ranks cannot run on this host; empty: they can, be it without GPUs."""
    if torch.cuda.is_available() and torch.cuda.device_count() < ranks:
        return f"trainer.gpusPerNode is {ranks}, got {torch.cuda.device_count()} GPUs here: lower it"
    return ""


def join_as_child() -> Ranks:
    """As a rank other than 0: meet the others, and die with the process that started this one."""
    for number in (signal.SIGTERM, signal.SIGINT):  # rank 0 ends us, between two steps
        signal.signal(number, signal.SIG_IGN)
    rank = own_rank(os.environ)
    device = device_of(int(os.environ.get("LOCAL_RANK", rank)))
    if torchrun_size(os.environ):
        return join(rank, torchrun_size(os.environ), device)
    die_with_parent(signal.SIGKILL)
    size = int(os.environ["WORLD_SIZE"])
    host, _, port = os.environ[_STORE].rpartition(" ")
    return join(rank, size, device, TCPStore(host, int(port), None, False, timeout=timedelta(seconds=JOIN_SECONDS)))


@dataclass(frozen=True, slots=True)
class Loss:
    """A rank that has ended by itself."""

    rank: int
    code: int
    """Of its process; below 0: the signal."""

    @property
    def all_raise_it(self) -> bool:
        """A mistake of the user's, found by every rank alike: rank 0 tells it, with its own exit code."""
        return self.code == UserError.exit_code

    @property
    def how(self) -> str:
        """Code or signal."""
        return f"code {self.code}" if self.code >= 0 else signal.Signals(-self.code).name

    def __str__(self) -> str:
        return (
            f"trainer rank {self.rank} ended with {self.how}: see its log; the run resumes from the newest checkpoint"
        )


class RankProcesses:
    """Some ranks as children. For the main thread, which must outlive them."""

    def __init__(
        self, ranks: Sequence[int], argv: Sequence[str], *, size: int, store: tuple[str, int], first_device: int = 0
    ) -> None:
        """`ranks` of `size` take the devices of this host from `first_device` on; all meet at `store` (host, port).

        `argv`: what starts a rank. Raises: OSError if a process cannot be started.
        """
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        on_host = str(first_device + len(ranks))
        for device, rank in enumerate(ranks, start=first_device):
            own = {
                "RANK": str(rank), "LOCAL_RANK": str(device), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": on_host,
            }  # fmt: skip
            self._children[rank] = _start(argv, own | {_STORE: f"{store[0]} {store[1]}"})
            log.info(PROCESS_STARTED, rank=rank, pid=self._children[rank].pid)

    @property
    def pids(self) -> list[int]:
        """By rank."""
        return [child.pid for child in self._children.values()]

    def loss(self) -> Loss | None:
        """The first that has ended and was not asked to; null: all run. It is logged."""
        for rank, child in self._children.items():
            code = child.poll()
            if code:  # 0: rank 0 ended it in order
                found = Loss(rank, code)
                log.error(RANK_ENDED, rank=rank, reason=found.how)
                return found
        return None

    def close(self, *, seconds: float) -> None:
        """Wait for all to end, so long together; kill who has not."""
        deadline = time.monotonic() + seconds
        for child in self._children.values():
            try:
                child.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
                with suppress(subprocess.TimeoutExpired):  # a driver may hold it for ever
                    child.wait(END_SECONDS)


def _start(argv: Sequence[str], own: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    environment = {**child_environment(os.environ), **own}
    return subprocess.Popen(argv, stdin=subprocess.DEVNULL, start_new_session=True, env=environment)
