"""How busy the GPUs are: NVML's utilisation, sampled in a thread. Without NVML: nothing, and it says so."""

import threading
import time
from typing import Any

_INTERVAL_SECONDS = 0.2


class Busy:
    """Samples from its making until `close`."""

    def __init__(self, gpus: list[int]) -> None:
        self._samples: list[tuple[float, list[int]]] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        try:
            import pynvml  # pyright: ignore[reportMissingImports]

            pynvml.nvmlInit()
            handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in gpus]
        except Exception as error:  # no NVML, or of another version: a bench must not end for it
            self.problem: str | None = f"{type(error).__name__}: {error}"
            return
        self.problem = None
        self._thread = threading.Thread(target=self._run, args=(pynvml, handles), daemon=True)
        self._thread.start()

    def _run(self, nvml: Any, handles: list[Any]) -> None:
        while not self._stop.wait(_INTERVAL_SECONDS):
            rates = [int(nvml.nvmlDeviceGetUtilizationRates(h).gpu) for h in handles]
            self._samples.append((time.time(), rates))

    def mean(self, since: float, until: float) -> list[float] | None:
        """Percent of each GPU between two Unix times; None without samples."""
        rows = [rates for at, rates in self._samples if since <= at <= until]
        return [round(sum(column) / len(column), 1) for column in zip(*rows, strict=True)] if rows else None

    def close(self) -> None:
        """End sampling."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(2.0)
