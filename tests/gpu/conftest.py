"""This tier needs a GPU, parts of it vLLM and a model: without them it says so, or fails if TBA_GPU_REQUIRED is set."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

MODEL = os.environ.get("TBA_GPU_MODEL")
"""Folder in Hugging Face format, such as SmolLM2-135M-Instruct; bfloat16 is what it is served in."""


def _obstacle() -> str | None:
    return None if torch.cuda.is_available() else "there is no CUDA GPU here"


def _obstacle_to_vllm() -> str | None:
    if find_spec("vllm") is None:
        return "vllm is not installed"
    if MODEL is None or not (Path(MODEL) / "model.safetensors").exists():
        return f"TBA_GPU_MODEL must name a model folder, got {MODEL!r}"
    return None


def pytest_collection_modifyitems(items):
    mine = [item for item in items if Path(__file__).parent in item.path.parents]
    for item in mine:
        obstacle = _obstacle() or (_obstacle_to_vllm() if "vllm" in item.path.name else None)
        if obstacle and os.environ.get("TBA_GPU_REQUIRED"):
            raise pytest.UsageError(f"{item.path.name} must run here, but {obstacle}")
        if obstacle:
            item.add_marker(pytest.mark.skip(reason=f"GPU tier: {obstacle}"))


@pytest.fixture(scope="session")
def model_folder() -> Path:
    """The model of the tier."""
    assert MODEL is not None
    return Path(MODEL)
