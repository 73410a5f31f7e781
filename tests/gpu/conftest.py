"""This tier needs a GPU, vLLM and a model folder; without them it says so, and fails where TBA_GPU_REQUIRED is set."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

MODEL = os.environ.get("TBA_GPU_MODEL")
"""Folder in Hugging Face format, such as SmolLM2-135M-Instruct; bfloat16 is what it is served in."""


def _obstacle() -> str | None:
    if not torch.cuda.is_available():
        return "there is no CUDA GPU here"
    if find_spec("vllm") is None:
        return "vllm is not installed"
    if MODEL is None or not (Path(MODEL) / "config.json").exists():
        return f"TBA_GPU_MODEL must name a model folder, got {MODEL!r}"
    return None


def pytest_collection_modifyitems(items):
    obstacle = _obstacle()
    if obstacle is None:
        return
    if os.environ.get("TBA_GPU_REQUIRED"):
        raise pytest.UsageError(f"the GPU tier must run here, but {obstacle}")
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=f"GPU tier: {obstacle}"))


@pytest.fixture(scope="session")
def model_folder() -> Path:
    """The model of the tier."""
    assert MODEL is not None
    return Path(MODEL)
