"""Where a model's weights are while it computes: a copy in a shorter dtype, and host memory while it does not.

float32 masters, bf16 copy: the forward pass uses exactly the weights that searchers get, nothing is cast anew at each
forward pass, activations and their memory halve against float32 weights under autocast. Gradients leave the backward
pass in bf16, one parameter at a time, and are summed over micro-batches in float32 in the masters.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


def cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """In place, with one tensor at a time there twice. Buffers keep their dtype: a cast may ruin them."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


class WorkingCopy:
    """The module that computes for `master`: the master itself if it has that dtype, else a copy of it."""

    def __init__(self, master: nn.Module, dtype: torch.dtype) -> None:
        self.master = master
        if all(p.dtype == dtype for p in master.parameters()):
            self.model = master
            return
        self.model = copy.deepcopy(master)
        cast_parameters(self.model, dtype)

    @property
    def _pairs(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        return list(zip(self.master.parameters(), self.model.parameters(), strict=True))

    @torch.no_grad()
    def refresh(self) -> None:
        """Take the master's present values."""
        if self.model is not self.master:
            pairs = self._pairs
            # All at once: a kernel a parameter would cost more than the copies.
            torch._foreach_copy_(  # pyright: ignore[reportPrivateImportUsage]
                [p.data for _, p in pairs], [m.data for m, _ in pairs]
            )
            for (_, buffer), (_, new) in zip(self.model.named_buffers(), self.master.named_buffers(), strict=True):
                buffer.copy_(new)

    def collect_gradients(self) -> None:
        """From now on each gradient of the copy is added to its master's and given up, during the backward pass."""
        if self.model is not self.master:
            for master, parameter in self._pairs:
                parameter.register_post_accumulate_grad_hook(_adds_to(master))


def _adds_to(master: nn.Parameter) -> Callable[[Tensor], None]:
    def add(parameter: Tensor) -> None:
        grad = parameter.grad
        if grad is None:
            return
        if master.grad is None:
            master.grad = grad.to(master.dtype)
        else:
            master.grad.add_(grad)
        parameter.grad = None

    return add


class Residence:
    """Parameters of a module that is used now and then: on the device always, or in host memory in between."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._module = module
        self._device = device
        self._host: list[Tensor] | None = None

    @property
    def offloaded(self) -> bool:
        """Whether parameters rest in host memory."""
        return self._host is not None

    @torch.no_grad()
    def offload(self, wanted: bool) -> None:
        """Let parameters rest in (pinned) host memory, or on the device again."""
        if wanted == self.offloaded:
            return
        if wanted:
            self._host = []
            for parameter in self._module.parameters():
                host = parameter.data.to("cpu", copy=True)
                self._host.append(host.pin_memory() if self._device.type == "cuda" else host)
            self._rest()
        else:
            self._arrive()
            self._host = None

    @contextmanager
    def present(self, *, changes: bool = False) -> Iterator[None]:
        """Parameters are on the device inside; `changes`: what became of them is kept."""
        if self._host is None:
            yield
            return
        with torch.no_grad():
            self._arrive()
        try:
            yield
        finally:
            if changes:
                for parameter, host in zip(self._module.parameters(), self._host, strict=True):
                    host.copy_(parameter.data)
            self._rest()

    def _arrive(self) -> None:
        assert self._host is not None
        for parameter, host in zip(self._module.parameters(), self._host, strict=True):
            parameter.data = host.to(self._device, non_blocking=True, copy=True)

    def _rest(self) -> None:
        assert self._host is not None
        for parameter, host in zip(self._module.parameters(), self._host, strict=True):
            parameter.data = host
