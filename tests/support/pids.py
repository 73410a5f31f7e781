"""Processes by their number."""

import time
from pathlib import Path


def children_of(pid: int) -> list[int]:
    """Those that its main thread has started."""
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_until_gone(pid: int, seconds: float = 10.0) -> None:
    """Until it has ended, be it reaped or not."""
    deadline = time.monotonic() + seconds
    while _runs(pid):
        assert time.monotonic() < deadline, f"process {pid} still runs"
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except FileNotFoundError:
        return False
