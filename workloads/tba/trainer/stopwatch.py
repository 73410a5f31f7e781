"""Seconds of each phase of a step, on the device that does the work, without making it wait.

On a GPU a phase is what lies between two events of its stream: `collate` is then the time the GPU stood still for rows.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch

Phase = Literal["collate", "reference", "forward_backward", "optimizer"]


class Stopwatch:
    """Of one step. `seconds` waits for the device: read it once, at the end."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._spans: list[tuple[Phase, Any, Any]] = []

    @contextmanager
    def __call__(self, phase: Phase) -> Iterator[None]:
        """Count what is done inside, or queued there, for `phase`."""
        start = self._now()
        try:
            yield
        finally:
            self._spans.append((phase, start, self._now()))

    def seconds(self) -> dict[str, float]:
        """By phase; every phase is there."""
        total: dict[str, float] = dict.fromkeys(get_args(Phase), 0.0)
        if self._on_gpu and self._spans:
            self._spans[-1][2].synchronize()
        for phase, start, end in self._spans:
            total[phase] += start.elapsed_time(end) / 1e3 if self._on_gpu else end - start
        return total

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
