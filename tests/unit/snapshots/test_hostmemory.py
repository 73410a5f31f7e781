"""Registered memory: never two holders of a block, none unregistered while held, the next of its size reuses it."""

import gc
import threading

import pytest
import torch

from tba.snapshots import hostmemory
from tba.snapshots.hostmemory import HOST_ALLOCATION, Blocks, host_memory

LARGE = 2**26 + 1


class Device:
    """What CUDA has registered; refuses what it would refuse."""

    def __init__(self) -> None:
        self.blocks: dict[int, int] = {}
        self.registered = 0
        self.it = Blocks(self.register, self.unregister)

    def register(self, address: int, size: int) -> None:
        assert address not in self.blocks
        self.blocks[address] = size
        self.registered += 1

    def unregister(self, address: int) -> None:
        del self.blocks[address]

    def holds(self, tensor: torch.Tensor) -> bool:
        return any(a <= tensor.data_ptr() < a + size for a, size in self.blocks.items())


def view_of(device: Device, num_bytes: int) -> torch.Tensor:
    """As a snapshot's tensors are made."""
    return torch.frombuffer(device.it.take(num_bytes).data[: num_bytes // 2], dtype=torch.uint8)


def test_a_view_alone_keeps_its_block_and_the_next_of_about_its_size_takes_it_over():
    device = Device()
    first, second = view_of(device, 1000), view_of(device, 1000)
    assert first.data_ptr() != second.data_ptr() and device.registered == 2
    was = first.data_ptr()
    del first
    gc.collect()
    third = view_of(device, 1010)
    assert third.data_ptr() == was and device.registered == 2
    assert device.holds(second) and device.holds(third)


def test_free_blocks_of_another_size_are_given_up():
    device = Device()
    kept, gone = view_of(device, 1000), view_of(device, 1000)
    del gone
    gc.collect()
    large = view_of(device, LARGE)
    assert sorted(device.blocks.values()) == [2**26, 2**27]
    assert device.holds(kept) and device.holds(large)


@pytest.mark.skipif(torch.cuda.is_available(), reason="about a process that does not use CUDA")
def test_without_cuda_it_is_plain_memory_of_any_size():
    assert [len(host_memory(n)) for n in (0, 7)] == [0, 7]
    assert not torch.cuda.is_initialized()


def test_nothing_is_registered_while_an_engine_starts_in_another_thread(monkeypatch):
    device = Device()
    monkeypatch.setattr(hostmemory, "_blocks", device.it)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    taken = threading.Event()
    fetching = threading.Thread(target=lambda: (host_memory(1000), taken.set()))
    with HOST_ALLOCATION:
        fetching.start()
        assert not taken.wait(0.1) and not device.blocks
    fetching.join()
    assert taken.is_set() and device.registered == 1
