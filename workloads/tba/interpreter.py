"""Threads of one Python process share its interpreter lock: who may hold it for how long."""

import sys

SWITCH_SECONDS = 0.0002
"""The default, 5 ms, is longer than many kernels of a GPU: a loop that gives the lock away for a moment, at each wait
for the device and each autograd function, would stand for 5 ms whenever another thread decodes, hashes or lists."""


def favour_the_loop() -> None:
    """Call once in a process whose main thread drives a device beside threads that do the rest."""
    sys.setswitchinterval(SWITCH_SECONDS)
