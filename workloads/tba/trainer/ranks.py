"""Several processes that train as one, each on a device of its own: how they talk.

```
rank 0, the trainer ── order (gloo: waits as long as it takes) ──► ranks 1 ...: do the same now
all ranks ◄────────── collectives of that order (NCCL or gloo), in the same sequence everywhere ──────────►
rank 0, publish thread ◄── messages through torch's store, beside all that (`channel`) ──► those of other ranks
```
A rank that ends breaks the connections of the others: their next order or collective raises.
"""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

from tba.snapshots.beside import Beside
from tba.trainer.channel import Channel

OrderKind = Literal["build", "step", "stage", "state", "restore", "end"]

COLLECTIVE_SECONDS = 1800.0
"""A rank may be so much slower than another within a step: the first compiles kernels, one reads a checkpoint."""
END_SECONDS = 30.0
"""For ranks to end when asked to, or to follow one that has raised an error."""
ORDER_DAYS = 3650
"""Between orders ranks wait for data, however long that takes."""
_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True, eq=False)
class Order:
    """What all ranks do next."""

    kind: OrderKind
    facts: Mapping[str, Any] = field(default_factory=dict)
    """JSON."""
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)

    def encode(self) -> bytes:
        """Length of a header, header (JSON), arrays one after another."""
        contiguous = {name: np.ascontiguousarray(a) for name, a in self.arrays.items()}
        shapes = {name: [a.dtype.str, list(a.shape)] for name, a in contiguous.items()}
        header = json.dumps({"kind": self.kind, "facts": self.facts, "arrays": shapes}).encode()
        return b"".join([len(header).to_bytes(_LENGTH_BYTES), header, *(a.tobytes() for a in contiguous.values())])

    @classmethod
    def decode(cls, data: bytes) -> "Order":
        """Undo `encode`."""
        place = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES])
        header = json.loads(data[_LENGTH_BYTES:place])
        arrays: dict[str, np.ndarray] = {}
        for name, (kind, shape) in header["arrays"].items():
            dtype = np.dtype(kind)
            count = int(np.prod(shape, dtype=np.int64))
            arrays[name] = np.frombuffer(data, dtype, count, place).reshape(shape).copy()  # writable
            place += count * dtype.itemsize
        return cls(header["kind"], header["facts"], arrays)


class Ranks:
    """This process among `size` ranks. For one thread: collectives have an order."""

    def __init__(self, rank: int, size: int, device: torch.device, store: Store, *, on_host: int) -> None:
        """After `torch.distributed.init_process_group` at `store`; all ranks at once."""
        self.rank = rank
        self.size = size
        self.on_host = on_host
        """Ranks that share this host's processors, this one included."""
        self.device = device
        self._store: Any = store
        self.mesh: DeviceMesh = init_device_mesh(device.type, (size,))
        self._orders: Any = dist.new_group(backend="gloo", timeout=timedelta(days=ORDER_DAYS))

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, the trainer."""
        return self.rank == 0

    def order(
        self,
        kind: OrderKind,
        facts: Mapping[str, Any] | None = None,
        arrays: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """As rank 0: have all others do this. They call the same functions for it, which order nothing there."""
        if self.leads:
            self._send(Order(kind, facts or {}, arrays or {}).encode())

    def next_order(self) -> Order:
        """As any other rank: wait for it. Raises: RuntimeError if rank 0 has gone."""
        return Order.decode(self._receive())

    def sum(self, tensor: Tensor) -> None:
        """Sum over ranks, in place. On a GPU the host does not wait."""
        dist.all_reduce(tensor)

    def who(self, mine: bool) -> list[int]:
        """The ranks of which something is true, on all ranks; `mine`: whether it is of this one."""
        flags = torch.zeros(self.size, dtype=torch.int64, device=self.device)
        flags[self.rank] = int(mine)
        self.sum(flags)
        return flags.nonzero().flatten().tolist()

    def channel(self, other: int) -> Channel:
        """To a thread of `other`, which asks for the one to this rank; rank 0 is one end of each.

        A client of its own: one that waits would hold up the process group's requests.
        """
        return Channel(self._store.clone(), own=f"rank{self.rank}", other=f"rank{other}")

    def say(self, text: str = "") -> str:
        """`text` of rank 0, on all ranks."""
        if self.leads:
            self._send(text.encode())
            return text
        return self._receive().decode()

    def stream(self, tensors: Mapping[str, Tensor] | None) -> Iterator[tuple[str, Tensor]]:
        """Rank 0's host tensors, one at a time, on all ranks; the others give None."""
        heads: list[tuple[str, str, list[int]]]
        if tensors is not None:
            heads = [(n, str(t.dtype).removeprefix("torch."), list(t.shape)) for n, t in tensors.items()]
            self._send(json.dumps(heads).encode())
        else:
            heads = json.loads(self._receive())
        for name, dtype, shape in heads:
            given = None if tensors is None else tensors[name].detach().to("cpu").contiguous()
            tensor = torch.empty(shape, dtype=getattr(torch, dtype)) if given is None else given
            if tensor.numel():  # as bytes: gloo does not know every dtype
                dist.broadcast(tensor.view(-1).view(torch.uint8), src=0, group=self._orders)
            yield name, tensor

    def close(self) -> None:
        """Leave; as rank 0: end the others in order. Not for long: one that hangs must not keep a run that is done."""
        Beside("ranks-leave", self._leave).wait(END_SECONDS)

    def _leave(self) -> None:
        if self.device.type == "cuda":  # the current device is a thread's own
            torch.cuda.set_device(self.device)
        self.order("end")
        dist.destroy_process_group()

    def _send(self, data: bytes) -> None:
        dist.broadcast(torch.tensor([len(data)]), src=0, group=self._orders)
        dist.broadcast(torch.frombuffer(bytearray(data), dtype=torch.uint8), src=0, group=self._orders)

    def _receive(self) -> bytes:
        length = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(length, src=0, group=self._orders)
        data = torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(data, src=0, group=self._orders)
        return data.numpy().tobytes()


def join(
    rank: int, size: int, device: torch.device, store: TCPStore | None = None, *, on_host: int | None = None
) -> Ranks:
    """Meet the other ranks at `store`, or where torchrun's environment variables say.

    `on_host`: ranks of this host; null: as the environment says, else all.
    """
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=COLLECTIVE_SECONDS)
    meeting = store if store is not None else next(rendezvous("env://", timeout=timeout))[0]
    dist.init_process_group(backend, store=meeting, rank=rank, world_size=size, timeout=timeout)
    return Ranks(rank, size, device, meeting, on_host=on_host or int(os.environ.get("LOCAL_WORLD_SIZE", size)))
