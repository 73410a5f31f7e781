"""Models and snapshots for the GPU benches: from a folder, or random weights in a known shape."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from tba.contracts.config import Model
from tba.contracts.keys import WeightsKey, new_nonce
from tba.contracts.records import SnapshotManifest
from tba.models import LoadedModel, load_model, weight_tensors
from tba.snapshots import Snapshot

SHAPES: Mapping[str, Any] = {
    "tiny": lambda: LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=4096, tie_word_embeddings=True, bos_token_id=None, eos_token_id=2,
    ),
    "0.135b": lambda: LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2,
        rope_parameters={"rope_type": "default", "rope_theta": 1e5},
    ),
    "1.5b": lambda: Qwen2Config(
        vocab_size=151936, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12,
        num_key_value_heads=2, max_position_embeddings=4096, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    ),
}  # fmt: skip
"""SmolLM2-135M and Qwen2.5-1.5B, by their published configurations."""


def random_model(shape: str, *, device: str = "cpu", dtype: torch.dtype = torch.float32) -> nn.Module:
    """Seeded random weights, eval mode."""
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(SHAPES[shape](), dtype=dtype).eval()


def random_assets(shape: str, tokenizer: Path) -> dict[str, bytes]:
    """Assets of a random model: its configuration and the tokenizer files of a folder."""
    config = SHAPES[shape]()
    config.architectures = [_architecture(config)]
    config.dtype = torch.bfloat16
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        assets = {"config.json": (Path(folder) / "config.json").read_bytes()}
    names = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")
    return assets | {n: (tokenizer / n).read_bytes() for n in names if (tokenizer / n).exists()}


def _architecture(config: Any) -> str:
    return {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}[config.model_type]


def load(folder: Path, *, max_model_len: int, dtype: str) -> LoadedModel:
    """A model folder as the trainer loads it: float32."""
    settings = Model(uri=f"file://{folder.resolve()}", max_model_len=max_model_len, dtype=dtype)  # pyright: ignore
    return load_model(settings, base_dir=folder)


def staged(model: nn.Module, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Host copies of the weights as a trainer publishes them; pinned where there is a GPU, as fetched ones are."""
    found: dict[str, Tensor] = {}
    for name, tensor in weight_tensors(model).items():
        copy = tensor.detach().to(dtype if tensor.is_floating_point() else tensor.dtype).to("cpu", copy=True)
        found[name] = copy.pin_memory() if torch.cuda.is_available() else copy
    return found


def in_memory_snapshot(tensors: Mapping[str, Tensor], assets: Mapping[str, bytes], version: int) -> Snapshot:
    """What an engine gets, without a store in between."""
    nonce = new_nonce()
    manifest = SnapshotManifest(epoch=1, version=version, nonce=nonce, files=[], tensors=[])
    return Snapshot(WeightsKey(version, 1, nonce).path, manifest, dict(tensors), dict(assets))
