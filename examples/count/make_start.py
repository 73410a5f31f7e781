# ruff: noqa: T201 (a command that prints)
"""Make prompts and start model of `count.yaml`: `python examples/count/make_start.py --model DIR`.

The model is supervised for a minute on worked answers, so that it knows how to count and reinforcement learning has
something to choose from: SmolLM2-135M-Instruct then answers .30 of held-out questions right at temperature 1. Runs
that are compared start from the same weights. On one kind of machine they should come out the same each time; the
digest that is printed, and kept in made.json, says whether they did.

    build/train.jsonl  build/test.jsonl  build/start/   (--task count-long: build-long/, count-short: build-short/)
"""

import argparse
import hashlib
import json
import os
import string
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch  # noqa: E402
from count_task import VARIANTS, make_item, write_prompts  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast  # noqa: E402

WARMUP_STEPS = 20
_IGNORED = -100


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--task", choices=list(VARIANTS), default="count")
    parser.add_argument("--model", type=Path, help="folder of SmolLM2-135M-Instruct, as hack/gguf_to_hf.py makes it")
    parser.add_argument("--tiny", action="store_true", help="a random model of 90,000 parameters, to rehearse with")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=3e-5)
    parser.add_argument("--train-prompts", type=int, default=20_000)
    parser.add_argument("--held-out", type=int, default=512)
    parser.add_argument("-o", "--output", type=Path, help="default: build, or build-long, next to this file")
    args = parser.parse_args()
    if (args.model is None) == (not args.tiny):
        parser.error("name --model, or --tiny")
    output = args.output or Path(__file__).parent / (args.task.replace("count", "build"))
    make(output, args)


def make(output: Path, args: argparse.Namespace) -> None:
    """Fill the folder, unless it is complete already."""
    settings = {k: str(v) for k, v in sorted(vars(args).items()) if k != "output"}
    record = output / "made.json"
    if record.exists() and json.loads(record.read_text()).get("settings") == settings:
        print(f"{output} is there already, made with the same settings")
        return
    record.unlink(missing_ok=True)  # what follows is incomplete until the record is written again
    output.mkdir(parents=True, exist_ok=True)
    (output / ".gitignore").write_text("*\n")
    write_prompts(output / "train.jsonl", (make_item(args.task, "train", i) for i in range(args.train_prompts)))
    write_prompts(output / "test.jsonl", (make_item(args.task, "test", i) for i in range(args.held_out)))
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else cuBLAS has no deterministic results
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.manual_seed(0)
    model, tokenizer = tiny() if args.tiny else load(args.model)
    supervise(model.to("cuda" if torch.cuda.is_available() else "cpu"), tokenizer, args)
    model.to(torch.bfloat16).eval().save_pretrained(output / "start")
    tokenizer.save_pretrained(output / "start")
    weights = digest(model)
    print(f"start {weights}", flush=True)
    record.write_text(json.dumps({"settings": settings, "weights": weights}, indent=2))


def digest(model: Any) -> str:
    """Tells starts apart: 12 hex digits of the weights' hash. Runs that are compared have one."""
    found = hashlib.sha256()
    for _, tensor in sorted(model.state_dict().items()):
        found.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return found.hexdigest()[:12]


def load(folder: Path) -> tuple[Any, Any]:
    """float32 weights and the tokenizer. Raises: SystemExit if responses would never end."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    if model.config.eos_token_id != tokenizer.eos_token_id:
        raise SystemExit(
            f"{folder}: the model ends with token {model.config.eos_token_id}, its tokenizer with "
            f"{tokenizer.eos_token_id}: convert it again"
        )
    return model, tokenizer


def tiny() -> tuple[Any, Any]:
    """A random Llama over printable characters with a chat template."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM

    symbols = [*(string.ascii_letters + string.digits + string.punctuation + " \n"), "<eos>", "<pad>"]
    raw = Tokenizer(models.WordLevel({s: i for i, s in enumerate(symbols)}, unk_token="<pad>"))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")  # pyright: ignore[reportAttributeAccessIssue]
    raw.decoder = decoders.Fuse()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<eos>", pad_token="<pad>")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}\n"
    config = LlamaConfig(
        vocab_size=len(symbols),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=symbols.index("<eos>"),
        pad_token_id=symbols.index("<pad>"),
    )
    return LlamaForCausalLM(config), tokenizer


def supervise(model: Any, tokenizer: Any, args: argparse.Namespace) -> None:
    """Train in place on items of the stream `sft`; float32 weights, bfloat16 computation on a GPU."""
    device = model.device
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    started = time.perf_counter()
    for step in range(1, args.steps + 1):
        first = (step - 1) * args.batch
        inputs, labels = encode(tokenizer, args.task, range(first, first + args.batch))
        for group in optimizer.param_groups:
            group["lr"] = args.learning_rate * min(1.0, step / WARMUP_STEPS) * max(0.1, 1 - step / args.steps)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(input_ids=inputs.to(device)).logits[:, :-1]
        loss = cross_entropy(logits.float().flatten(0, 1), labels[:, 1:].flatten().to(device), ignore_index=_IGNORED)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % max(1, args.steps // 6) == 0:
            print(
                f"step {step}/{args.steps}  loss {loss.item():.3f}  {time.perf_counter() - started:.0f} s", flush=True
            )


def encode(tokenizer: Any, task: str, indices: range) -> tuple[torch.Tensor, torch.Tensor]:
    """Input ids and labels, both (n, L) int64, padded on the right; labels are -100 outside the answer and its end."""
    rows: list[tuple[list[int], list[int]]] = []
    for index in indices:
        item = make_item(task, "sft", index)
        messages = [{"role": "user", "content": item.question}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
        answer = tokenizer(item.worked, add_special_tokens=False)["input_ids"]
        rows.append((prompt, [*answer, tokenizer.eos_token_id]))
    length = max(len(p) + len(a) for p, a in rows)
    inputs = torch.zeros((len(rows), length), dtype=torch.long)
    labels = torch.full_like(inputs, _IGNORED)
    for i, (prompt, answer) in enumerate(rows):
        inputs[i, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        labels[i, len(prompt) : len(prompt) + len(answer)] = torch.tensor(answer)
    return inputs, labels


if __name__ == "__main__":
    main()
