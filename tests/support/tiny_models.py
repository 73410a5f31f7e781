"""A random Llama of a few thousand parameters with a character tokenizer, saved in Hugging Face format."""

from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast


def save_tiny(folder: Path, *, tied: bool, seed: int = 0) -> Path:
    """Vocabulary: digits 0-9, + (10), = (11), <eos> (12), <pad> (13)."""
    vocab = {c: i for i, c in enumerate("0123456789+=")} | {"<eos>": 12, "<pad>": 13}
    raw = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")  # pyright: ignore
    raw.decoder = decoders.Fuse()  # pyright: ignore
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<eos>", pad_token="<pad>")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=14, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, tie_word_embeddings=tied, eos_token_id=12,
        bos_token_id=None, pad_token_id=13, attention_dropout=0.3,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.3)
    model.generation_config.temperature = 0.1
    model.generation_config.do_sample = True
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
