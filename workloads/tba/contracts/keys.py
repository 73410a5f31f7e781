"""The only module that spells an object key. Fixed-width numbers: key order is numeric order (system.md §4).

Keys are relative to the run's root. Each `*Key` round-trips: `XKey.parse(key.path) == key`.
"""

import re
import secrets
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

LATEST = "latest"
RUN = "run.json"
MANIFEST = "manifest.json"
MASTER = "master.safetensors"
"""In a checkpoint: its weights, float32."""
SHARDS = "shards/"
WEIGHTS = "weights/"
CHECKPOINTS = "checkpoints/"
EVAL = "eval/"
METRICS = "metrics/"
INGEST = "ingest/"
PROMPTS = "prompts/"
REWARDS = "rewards/"
PINS = "pins/"
PROBE = "probe/"
"""Where a store is tried before a run; removed again, but for a process that is killed meanwhile."""

_HEX = r"[0-9a-f]{32}"
_NAME = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"


def new_nonce() -> str:
    """128 random bits as 32 hex digits: names an attempt, an incarnation or a body so that no two are equal."""
    return secrets.token_hex(16)


def is_searcher_name(text: str) -> bool:
    """Whether a searcher may be called so."""
    return re.fullmatch(_NAME, text) is not None


def _check(name: str, value: int, digits: int) -> None:
    if not 0 <= value < 10**digits:
        raise ValueError(f"{name} must be in 0..{10**digits - 1}, got {value}")


def _match(pattern: str, path: str, kind: str) -> re.Match[str]:
    found = re.fullmatch(pattern, path)
    if not found:
        raise ValueError(f"not a {kind} key: {path!r}")
    return found


@dataclass(frozen=True, slots=True, order=True)
class ShardKey:
    """`shards/{window:010d}/{searcher}.{incarnation}.{seq:010d}.arrow`."""

    window: int
    searcher: str
    incarnation: str
    seq: int

    def __post_init__(self) -> None:
        _check("window", self.window, 10)
        _check("seq", self.seq, 10)
        if not is_searcher_name(self.searcher):
            raise ValueError(f"searcher must match {_NAME}, got {self.searcher!r}: use lower-case letters, digits, '-'")
        if not re.fullmatch(_HEX, self.incarnation):
            raise ValueError(f"incarnation must be 32 hex digits, got {self.incarnation!r}")

    @property
    def path(self) -> str:
        """The object key."""
        return f"{window_prefix(self.window)}{self.searcher}.{self.incarnation}.{self.seq:010d}.arrow"

    @classmethod
    def parse(cls, path: str) -> Self:
        """Raises: ValueError if `path` is no shard key."""
        m = _match(rf"shards/(\d{{10}})/({_NAME})\.({_HEX})\.(\d{{10}})\.arrow", path, "shard")
        return cls(int(m[1]), m[2], m[3], int(m[4]))


def window_prefix(window: int) -> str:
    """`shards/{window:010d}/`: one leaf prefix to list."""
    return f"{SHARDS}{window:010d}/"


def parse_window(path: str) -> int:
    """The window number of a shard key or window prefix, even if the file name is foreign."""
    return int(_match(r"shards/(\d{10})/.*", path, "window")[1])


@dataclass(frozen=True, slots=True, order=True)
class WeightsKey:
    """`weights/{version:010d}/{epoch:06d}-{nonce}/`: one published snapshot."""

    version: int
    epoch: int
    nonce: str

    def __post_init__(self) -> None:
        _check("version", self.version, 10)
        _check("epoch", self.epoch, 6)

    @property
    def prefix(self) -> str:
        """Folder of the snapshot's objects."""
        return f"{WEIGHTS}{self.version:010d}/{self.epoch:06d}-{self.nonce}/"

    @property
    def path(self) -> str:
        """Key of its manifest, which is written last."""
        return f"{self.prefix}{MANIFEST}"

    @classmethod
    def parse(cls, path: str) -> Self:
        """From any key below the prefix."""
        m = _match(rf"weights/(\d{{10}})/(\d{{6}})-({_HEX})/.*", path, "weights")
        return cls(int(m[1]), int(m[2]), m[3])


@dataclass(frozen=True, slots=True, order=True)
class CheckpointKey:
    """`checkpoints/{step:010d}/{epoch:06d}-{nonce}/`: one resumable trainer state."""

    step: int
    epoch: int
    nonce: str

    def __post_init__(self) -> None:
        _check("step", self.step, 10)
        _check("epoch", self.epoch, 6)

    @property
    def prefix(self) -> str:
        """Folder of the checkpoint's objects."""
        return f"{CHECKPOINTS}{self.step:010d}/{self.epoch:06d}-{self.nonce}/"

    @property
    def path(self) -> str:
        """Key of its manifest, which is written last."""
        return f"{self.prefix}{MANIFEST}"

    @classmethod
    def parse(cls, path: str) -> Self:
        """From any key below the prefix."""
        m = _match(rf"checkpoints/(\d{{10}})/(\d{{6}})-({_HEX})/.*", path, "checkpoint")
        return cls(int(m[1]), int(m[2]), m[3])


@dataclass(frozen=True, slots=True, order=True)
class EvalKey:
    """`eval/{version:010d}/{epoch:06d}-{nonce}/{block:06d}.arrow`: put once by any searcher; a duplicate loses."""

    version: int
    epoch: int
    nonce: str
    block: int

    def __post_init__(self) -> None:
        _check("version", self.version, 10)
        _check("epoch", self.epoch, 6)
        _check("block", self.block, 6)

    @property
    def prefix(self) -> str:
        """Folder of the blocks of this evaluation; version, epoch and nonce are those of the snapshot."""
        return f"{EVAL}{self.version:010d}/{self.epoch:06d}-{self.nonce}/"

    @property
    def path(self) -> str:
        """The object key."""
        return f"{self.prefix}{self.block:06d}.arrow"

    @classmethod
    def parse(cls, path: str) -> Self:
        """Raises: ValueError if `path` is no evaluation block key."""
        m = _match(rf"eval/(\d{{10}})/(\d{{6}})-({_HEX})/(\d{{6}})\.arrow", path, "eval")
        return cls(int(m[1]), int(m[2]), m[3], int(m[4]))


@dataclass(frozen=True, slots=True, order=True)
class LogKey:
    """`{kind}/{epoch:06d}/{seq:010d}.jsonl` with kind `ingest` or `metrics`: append-only logs of one epoch."""

    kind: str
    epoch: int
    seq: int

    def __post_init__(self) -> None:
        if self.kind not in ("ingest", "metrics"):
            raise ValueError(f"log kind must be ingest or metrics, got {self.kind!r}")
        _check("epoch", self.epoch, 6)
        _check("seq", self.seq, 10)

    @property
    def prefix(self) -> str:
        """Folder of this epoch's log."""
        return f"{self.kind}/{self.epoch:06d}/"

    @property
    def path(self) -> str:
        """The object key."""
        return f"{self.prefix}{self.seq:010d}.jsonl"

    @classmethod
    def parse(cls, path: str) -> Self:
        """Raises: ValueError if `path` is no log key."""
        m = _match(r"(ingest|metrics)/(\d{6})/(\d{10})\.jsonl", path, "log")
        return cls(m[1], int(m[2]), int(m[3]))


def prompts_key(sha256: str) -> str:
    """`prompts/{sha256}.arrow`: a materialised prompt set, named by its content."""
    _match(r"[0-9a-f]{64}", sha256, "sha256")
    return f"{PROMPTS}{sha256}.arrow"


def reward_key(sha256: str) -> str:
    """`rewards/{sha256}.py`: the code of a run's own reward, named by its content."""
    _match(r"[0-9a-f]{64}", sha256, "sha256")
    return f"{REWARDS}{sha256}.py"


def pin_key(step: int) -> str:
    """`pins/{step:010d}`: its presence keeps that step's checkpoint from the sweep."""
    _check("step", step, 10)
    return f"{PINS}{step:010d}"


_PATH_KEYS = (ShardKey, WeightsKey, CheckpointKey, EvalKey, LogKey)
_PLAIN_KEYS = rf"prompts/[0-9a-f]{{64}}\.arrow|rewards/[0-9a-f]{{64}}\.py|pins/\d{{10}}|{PROBE}{_HEX}/.*"


def names_run_object(path: str) -> bool:
    """Whether this key is one that runs alone write. Not so `latest` and `run.json`: anybody may name an object so."""
    for kind in _PATH_KEYS:
        with suppress(ValueError):
            kind.parse(path)
            return True
    return re.fullmatch(_PLAIN_KEYS, path) is not None
