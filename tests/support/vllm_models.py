"""A random Llama of half a million parameters, with a head size that vLLM has kernels for; made, not downloaded."""

from pathlib import Path

import torch
from support.engines import Manifest, Weights
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from tba.contracts.records import PolicyId
from tba.models import build_model, weight_tensors

CHARACTERS = "0123456789+=abcdefghijklmnopqrst"
EOS, PAD = len(CHARACTERS), len(CHARACTERS) + 1


def save_small(folder: Path, *, tied: bool, seed: int = 0) -> Path:
    """In Hugging Face format. Vocabulary: `CHARACTERS`, <eos>, <pad>."""
    vocab = {c: i for i, c in enumerate(CHARACTERS)} | {"<eos>": EOS, "<pad>": PAD}
    raw = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")  # pyright: ignore
    raw.decoder = decoders.Fuse()  # pyright: ignore
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<eos>", pad_token="<pad>")
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(vocab), hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=512, tie_word_embeddings=tied, eos_token_id=EOS,
        bos_token_id=None, pad_token_id=PAD,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    _randomise(model)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def assets_of(folder: Path) -> dict[str, bytes]:
    """What a snapshot carries of a model's folder."""
    skip = {"model.safetensors", "generation_config.json"}
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.name not in skip}


def small_weights(assets: dict[str, bytes], seed: int) -> Weights:
    """Other weights for the same model, of policy (1, seed)."""
    model, _ = build_model(assets, dtype=torch.float32, device="cpu")
    torch.manual_seed(seed)
    _randomise(model)
    return Weights(Manifest(PolicyId(1, seed)), {n: t.clone() for n, t in weight_tensors(model).items()}, assets)


@torch.no_grad()
def _randomise(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        # Peaked enough that other weights give clearly other probabilities.
        parameter.normal_(std=0.12) if parameter.dim() > 1 else parameter.fill_(1.0)
