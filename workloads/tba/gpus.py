"""Which GPUs the driver shows, without CUDA: a look must not take memory or start a context in this process."""

from pathlib import Path

DRIVER = Path("/proc/driver/nvidia")


def gpu_model(driver: Path = DRIVER) -> str | None:
    """Name of the GPUs, as the driver has it; None without any, with several kinds, or where one is cut up (MIG)."""
    if any(driver.glob("capabilities/gpu*/mig/gi*")):
        return None
    names = set()
    for file in driver.glob("gpus/*/information"):
        try:
            lines = file.read_text().splitlines()
        except OSError:
            return None
        names |= {line.partition(":")[2].strip() for line in lines if line.startswith("Model:")}
    return names.pop() if len(names) == 1 else None
