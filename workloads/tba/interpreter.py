"""How a process of a run treats its interpreter: who holds the lock for how long, what is searched for garbage."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

SWITCH_SECONDS = 0.0002
"""The default, 5 ms, is longer than many kernels of a GPU: a loop that gives the lock away for a moment, at each wait
for the device and each autograd function, would stand for 5 ms whenever another thread decodes, hashes or lists."""


def favour_the_loop() -> None:
    """Call once in a process whose main thread drives a device beside threads that do the rest."""
    sys.setswitchinterval(SWITCH_SECONDS)


@contextmanager
def loading(package: str) -> Iterator[None]:
    """Import `package`, and what comes with it, within: not searched for garbage, neither now nor later.

    torch and transformers make 400,000 objects that live as long as the process. Python would search them a hundred
    times while they load, a fifth of that time, and again in each full collection: 0.4 s with the lock held.
    For the start of a process: what else lives at the end of the block is never searched either.
    """
    if package in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
