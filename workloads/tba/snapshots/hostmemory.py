"""Host memory for weights, registered with CUDA where this process computes there: copies from it need no detour.

Not torch's pinned memory: that rounds up to powers of two (3 GB would take 4), and asking for it starts CUDA in a
process that has no turn on the device yet. Registering locks every page and holds up kernels meanwhile: a block that
nobody holds any more is kept for the next of its size.
"""

import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_GRAIN_BYTES = 2**26
"""Blocks are multiples of it: an anchor, which has headers, takes one of the same size as the deltas on it."""
_PORTABLE = 1  # for the contexts of all devices

HOST_ALLOCATION = threading.RLock()
"""Held by whoever has CUDA allocate or register host memory, and by an engine while it starts: a CUDA graph that is
being captured is lost if any thread of the process does either meanwhile, and the engine with it."""


class Blocks:
    """Registered memory, lent out. Whoever copies from it asynchronously waits for that before letting it go."""

    def __init__(self, register: Callable[[int, int], None], unregister: Callable[[int], None]) -> None:
        """`register` takes an address and bytes, `unregister` the address."""
        self._register = register
        self._unregister = unregister
        self._free: list[npt.NDArray[np.uint8]] = []

    def take(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        """Memory of undefined content, lent until neither it nor a view of it is referred to. Free blocks of another
        size are given up."""
        size = -(-num_bytes // _GRAIN_BYTES) * _GRAIN_BYTES
        lent = self._block(size)[:num_bytes]
        assert isinstance(lent.base, np.ndarray)
        weakref.finalize(lent, self._free.append, lent.base).atexit = False
        return lent

    def _block(self, size: int) -> npt.NDArray[np.uint8]:
        with suppress(IndexError):  # emptied, perhaps by another thread
            while True:
                block = self._free.pop()
                if len(block) == size:
                    return block
                self._unregister(block.ctypes.data)
        block = np.empty(size, np.uint8)
        self._register(block.ctypes.data, size)
        return block


def host_memory(num_bytes: int) -> npt.NDArray[np.uint8]:
    """Memory of undefined content, `Blocks`' if this process uses CUDA already. Waits for `HOST_ALLOCATION`."""
    if num_bytes and torch.cuda.is_initialized():
        with HOST_ALLOCATION:
            return _blocks.take(num_bytes)
    return np.empty(num_bytes, np.uint8)


def _register(address: int, size: int) -> None:
    cudart: Any = torch.cuda.cudart()
    if code := int(cudart.cudaHostRegister(address, size, _PORTABLE)):
        raise MemoryError(f"CUDA cannot register {size} bytes of host memory: error {code}")


def _unregister(address: int) -> None:
    cudart: Any = torch.cuda.cudart()
    cudart.cudaHostUnregister(address)


_blocks = Blocks(_register, _unregister)
