"""Data-parallel ranks without a default process group, which an engine in the same process may want for itself."""

import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from tba.trainer.optim import Update

_BUCKET_BYTES = 64 * 2**20
_TIMEOUT = timedelta(seconds=300)


class Ranks:
    """`world` processes of one host that average tensors and share small facts through rank 0's key-value store."""

    def __init__(self, rank: int, world: int, port: int, device: torch.device) -> None:
        self.rank, self.world = rank, world
        self._count = 0
        if world == 1:
            return
        self._store = TCPStore("127.0.0.1", port, world, is_master=rank == 0, timeout=_TIMEOUT)
        prefix = PrefixStore("gradients", self._store)
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            self._group: Any = dist.ProcessGroupNCCL(prefix, rank, world, options)
        else:
            self._group = dist.ProcessGroupGloo(prefix, rank, world, _TIMEOUT)

    def average(self, tensors: list[torch.Tensor]) -> None:
        """Replace each tensor by its mean over ranks, in buckets: one message of 64 MB beats hundreds."""
        if self.world == 1:
            return
        bucket: list[torch.Tensor] = []
        size = 0
        for tensor in tensors:
            bucket.append(tensor)
            size += tensor.nbytes
            if size >= _BUCKET_BYTES:
                self._average(bucket)
                bucket, size = [], 0
        self._average(bucket)

    def _average(self, bucket: list[torch.Tensor]) -> None:
        if not bucket:
            return
        flat = torch.cat([t.reshape(-1) for t in bucket])
        self._group.allreduce([flat]).wait()
        flat /= self.world
        start = 0
        for tensor in bucket:
            tensor.copy_(flat[start : start + tensor.numel()].view_as(tensor))
            start += tensor.numel()

    def total(self, value: float) -> float:
        """Sum over ranks; every rank must call it in the same order."""
        if self.world == 1:
            return value
        self._count += 1
        self._store.set(f"sum/{self._count}/{self.rank}", repr(value))
        keys = [f"sum/{self._count}/{r}" for r in range(self.world)]
        self._store.wait(keys)
        return sum(float(self._store.get(key)) for key in keys)

    def wait(self) -> float:
        """Until all ranks are here; the seconds that took."""
        started = time.perf_counter()
        self.total(0.0)
        return time.perf_counter() - started


class AveragingOptimizer:
    """A learner's optimizer that averages the gradients of all ranks first: P / world groups each, equal shares."""

    def __init__(self, inner: Any, parameters: list[torch.nn.Parameter], ranks: Ranks) -> None:
        self._inner, self._parameters, self._ranks = inner, parameters, ranks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def apply(self, step: int) -> Update:
        """Average, clip, step."""
        self._ranks.average([p.grad for p in self._parameters if p.grad is not None])
        return self._inner.apply(step)


def main() -> None:
    """`python -m bench.gpu.average RANK WORLD PORT`: whether the ranks of this host can average at all."""
    rank, world, port = (int(a) for a in sys.argv[1:4])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ranks = Ranks(rank, world, port, device)
    large = torch.full((50_000_000,), float(rank), device=device)
    small = torch.arange(10.0, device=device) * (rank + 1)
    started = time.perf_counter()
    ranks.average([large, small])
    value = float(large[-1])  # waits for the device
    seconds = time.perf_counter() - started
    mean = (world - 1) / 2
    right = value == mean and torch.equal(small.cpu(), torch.arange(10.0) * (mean + 1))
    if ranks.total(float(right)) != world:
        raise SystemExit(f"rank {rank}: the mean of {world} ranks is wrong: got {value}, want {mean}")
    if rank == 0:
        print(f"{world} ranks average 200 MB in {seconds:.3f} s, the first time")


if __name__ == "__main__":
    main()
