"""Collects what reward code leaves behind where this process is the one that orphans fall to: process 1 of a container.

Without it each stray program of a reward stays a zombie, until the pod may start no process any more.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class _Process(NamedTuple):
    pid: int
    state: str
    parent: int
    session: int


def reap_orphans() -> int:
    """Collect ended children that are not of our making; returns how many.

    Those have a session that is neither ours nor their own: what we start is in our session or leads a new one.
    """
    me, session = os.getpid(), os.getsid(0)
    found = [p for p in _processes() if p.parent == me and p.state == "Z" and p.session not in (p.pid, session)]
    return sum(collect(p.pid) for p in found)


def collect(pid: int) -> bool:
    """Collect one ended child; False if it is none of ours or goes on."""
    with contextlib.suppress(ChildProcessError):
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    return False


def _processes() -> Iterator[_Process]:
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):  # gone meanwhile
                # "pid (name) state parent group session": the name may hold anything, also brackets.
                text = Path("/proc", entry, "stat").read_text(errors="replace")
                state, parent, _, session = text.rpartition(")")[2].split()[:4]
                yield _Process(int(entry), state, int(parent), int(session))
