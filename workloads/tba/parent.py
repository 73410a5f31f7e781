"""A process that ends with the one that started it, however that ends."""

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None  # before a fork: a child may load nothing


def die_with_parent(by: signal.Signals = signal.SIGTERM) -> None:
    """Have the kernel send this process `by` when the thread that started it ends. On Linux."""
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, by)
