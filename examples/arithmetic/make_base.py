# ruff: noqa: T201 (a command that prints)
"""Make the laptop example's base model and data: `python examples/arithmetic/make_base.py`.

A Llama of 0.8 M parameters is supervised on two-digit additions whose answers ignore carries with probability .85 and
are right otherwise. It so knows both ways, and reinforcement learning has to choose: it elicits, it does not teach.
Everything is seeded and nothing is downloaded. A folder made with the same settings is left as it is.
"""

import argparse
import hashlib
import json
import os
import random
import time
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # 128-wide matrices: more threads cost more than they bring

import torch  # noqa: E402
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: E402

SYMBOLS = "0123456789+="
EOS, PAD = 12, 13
PROMPT_TOKENS = 6
MAX_RESPONSE_TOKENS = 4  # three digits and the end
HELD_OUT = 512

Pair = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Settings:
    """What determines every byte of the result."""

    seed: int = 0
    steps: int = 400
    batch: int = 256
    learning_rate: float = 1e-3
    warmup_steps: int = 50
    no_carry_probability: float = 0.85
    recipe: int = 1  # raise it when the code below changes its result

    @property
    def hash(self) -> str:
        """Names the settings in the result's folder."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


def prompt(pair: Pair) -> str:
    """`07+45=`."""
    return f"{pair[0]:02d}+{pair[1]:02d}="


def answer(pair: Pair) -> str:
    """The sum."""
    return str(sum(pair))


def answer_without_carries(pair: Pair) -> str:
    """Each column on its own: 47+35 gives 72."""
    tens, ones = pair[0] // 10 + pair[1] // 10, pair[0] % 10 + pair[1] % 10
    return str(10 * (tens % 10) + ones % 10)


def split() -> tuple[list[Pair], list[Pair]]:
    """All 10 000 pairs in a fixed order: (train, held-out). The same for every seed."""
    pairs = [(x, y) for x in range(100) for y in range(100)]
    random.Random(1).shuffle(pairs)
    return pairs[HELD_OUT:], pairs[:HELD_OUT]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a symbol; nothing is added before or after a prompt."""
    vocabulary = {symbol: i for i, symbol in enumerate(SYMBOLS)} | {"<eos>": EOS, "<pad>": PAD}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.Fuse()  # pyright: ignore[reportAttributeAccessIssue]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", clean_up_tokenization_spaces=False
    )


def make_model() -> LlamaForCausalLM:
    """0.79 M parameters, float32."""
    config = LlamaConfig(
        vocab_size=len(SYMBOLS) + 2,
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        initializer_range=0.04,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    return LlamaForCausalLM(config)


def encode(pairs: list[Pair], answers: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Input ids and labels, both (n, 10) int64; labels are -100 outside the answer and its EOS."""
    inputs = torch.full((len(pairs), PROMPT_TOKENS + MAX_RESPONSE_TOKENS), PAD)
    labels = torch.full_like(inputs, -100)
    for row, (pair, text) in enumerate(zip(pairs, answers, strict=True)):
        ids = [SYMBOLS.index(c) for c in prompt(pair) + text] + [EOS]
        inputs[row, : len(ids)] = torch.tensor(ids)
        labels[row, PROMPT_TOKENS : len(ids)] = inputs[row, PROMPT_TOKENS : len(ids)]
    return inputs, labels


def supervise(model: LlamaForCausalLM, settings: Settings, train: list[Pair]) -> None:
    """Train in place, printing progress."""
    rng = random.Random(settings.seed)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    start = time.perf_counter()
    for step in range(1, settings.steps + 1):
        pairs = rng.choices(train, k=settings.batch)
        lazy = [rng.random() < settings.no_carry_probability for _ in pairs]
        answers = [answer_without_carries(p) if skip else answer(p) for p, skip in zip(pairs, lazy, strict=True)]
        inputs, labels = encode(pairs, answers)
        logits = model(input_ids=inputs[:, :-1]).logits[:, PROMPT_TOKENS - 1 :]  # (batch, 4, vocabulary)
        loss = cross_entropy(logits.flatten(0, 1), labels[:, PROMPT_TOKENS:].flatten())
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * min(1.0, step / settings.warmup_steps)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0:
            print(
                f"step {step}/{settings.steps}  loss {loss.item():.3f}  {time.perf_counter() - start:.0f} s", flush=True
            )


@torch.no_grad()
def accuracy(model: LlamaForCausalLM, pairs: list[Pair], *, greedy: bool, seed: int = 0) -> float:
    """Share of right answers, end included."""
    generator = torch.Generator().manual_seed(seed)
    ids = encode(pairs, [""] * len(pairs))[0][:, :PROMPT_TOKENS]
    for _ in range(MAX_RESPONSE_TOKENS):
        logits = model(input_ids=ids).logits[:, -1]
        token = logits.argmax(-1, keepdim=True) if greedy else logits.softmax(-1).multinomial(1, generator=generator)
        ids = torch.cat([ids, token], dim=1)
    texts = ["".join((SYMBOLS + "$$")[i] for i in row) for row in ids[:, PROMPT_TOKENS:].tolist()]
    return sum(t.startswith(answer(p) + "$") for t, p in zip(texts, pairs, strict=True)) / len(pairs)


def write_jsonl(path: Path, pairs: list[Pair]) -> None:
    """One `{"question", "answer"}` a line."""
    path.write_text("".join(json.dumps({"question": prompt(p), "answer": answer(p)}) + "\n" for p in pairs))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, default=Path(__file__).parent / "build")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=Settings().steps)
    parser.add_argument("--upload", metavar="URI", help="s3://bucket/prefix to copy the result to, for a cluster")
    args = parser.parse_args()
    make(args)
    if args.upload:
        upload(args.output, args.upload)


def make(args: argparse.Namespace) -> None:
    """Fill the output folder, unless it holds just this."""
    settings = Settings(seed=args.seed, steps=args.steps)
    record = args.output / "made.json"
    if record.exists() and json.loads(record.read_text())["hash"] == settings.hash:
        print(f"{args.output} is there already, made with the same settings")
        return
    record.unlink(missing_ok=True)  # what follows is incomplete until the record is written again
    args.output.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    torch.manual_seed(settings.seed)
    train, held_out = split()
    (args.output / ".gitignore").write_text("*\n")
    write_jsonl(args.output / "train.jsonl", train)
    write_jsonl(args.output / "test.jsonl", held_out)
    model = make_model()
    supervise(model, settings, train)
    model.eval().save_pretrained(args.output / "base")
    make_tokenizer().save_pretrained(args.output / "base")
    result = {"sampled": accuracy(model, held_out, greedy=False), "greedy": accuracy(model, held_out, greedy=True)}
    print(
        f"{model.num_parameters():,} parameters  held-out accuracy: "
        + "  ".join(f"{k} {v:.3f}" for k, v in result.items())
    )
    record.write_text(json.dumps({"hash": settings.hash, "settings": asdict(settings), "accuracy": result}, indent=2))


def upload(folder: Path, uri: str) -> None:
    """Copy the model and the prompts to a bucket; what is there already stays."""
    from tba.store import open_store

    store = open_store(uri)
    for path in sorted((*folder.glob("*.jsonl"), *folder.glob("base/*"))):
        key = str(path.relative_to(folder))
        store.put_once(key, path.read_bytes())
        print(f"{uri}/{key}")


if __name__ == "__main__":
    main()
