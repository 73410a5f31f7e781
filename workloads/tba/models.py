"""Causal language models: from a URI to float32 masters, from a snapshot's assets to a model that can be filled.

Assets are the files besides weights that rebuild model and tokenizer anywhere (config.json, tokenizer files, and the
repository's own code if it was trusted). generation_config.json is never among them: neutral sampling means that
nothing a model's author put there is applied silently.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
import xxhash
from torch import nn

from tba.contracts import config
from tba.contracts.errors import CorruptObject, UserError
from tba.mounts import claim_path
from tba.store import ObjectStore
from tba.store import open_store as default_open_store

_CONFIG = "config.json"
# The weight format that transformers loads without pickle, and the small files around it.
_WEIGHTS = "*.safetensors"
_SMALL = ("*.json", "*.model", "*.jinja", "*.txt", "*.py", "additional_chat_templates/*")
_ALL = (*_SMALL, _WEIGHTS)
_CHUNK_BYTES = 1 << 22

OpenStore = Callable[[str], ObjectStore]


class HubUnreachable(UserError):
    """The hub does not answer from here, and the model is not in its local cache."""


@dataclass(slots=True)
class LoadedModel:
    """A model ready to train or to publish."""

    model: nn.Module  # float32 parameters, eval mode, dropout off
    tokenizer: Any
    assets: dict[str, bytes]
    revision: str  # commit hash for hf://, hash of the files for file:// and s3://


def load_model(
    settings: config.Model, *, base_dir: Path, token: str | None = None, open_store: OpenStore = default_open_store
) -> LoadedModel:
    """Load `settings.uri` with float32 parameters. A relative file:// path is relative to `base_dir`.

    `token` is for hf://; null takes the environment's. `open_store` opens an s3:// prefix, such as at a run's endpoint.
    Raises: UserError if there is no such model or it needs code that is not trusted; StoreUnavailable.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # it would tear the live display
    with _local_directory(settings, _ALL, base_dir, token, open_store) as directory:
        # The hub's cache names a snapshot's folder by its commit.
        revision = directory.name if settings.uri.startswith("hf://") else _content_revision(directory)
        model_config, tokenizer = _read_directory(directory, settings.trust_remote_code, settings.uri)
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(
                directory,
                config=model_config,
                dtype=torch.float32,
                trust_remote_code=settings.trust_remote_code,
                use_safetensors=True,
                local_files_only=True,
            )
        except OSError as e:
            raise _no_weights(settings.uri, str(e)) from e
        assets = _collect_assets(directory, model.config, tokenizer, settings.trust_remote_code)
    # Old checkpoints may name their own (half) precision; the masters are float32 whatever they say.
    return LoadedModel(_without_dropout(model.float()), tokenizer, assets, revision)


def outline_model(
    settings: config.Model, *, base_dir: Path, token: str | None = None, open_store: OpenStore = default_open_store
) -> tuple[nn.Module, Any]:
    """The model of `settings.uri` on the meta device, and its tokenizer: what is known before any weight is read.

    Arguments and errors are those of `load_model`, as far as they do not need weights; those of hf:// and s3:// are not
    downloaded.
    """
    from transformers import AutoModelForCausalLM

    with _local_directory(settings, _SMALL, base_dir, token, open_store) as directory:
        model_config, tokenizer = _read_directory(directory, settings.trust_remote_code, settings.uri)
        if settings.uri.startswith(("file://", "pvc://")) and not any(directory.glob(_WEIGHTS)):
            raise _no_weights(settings.uri, "there are none")
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(model_config, trust_remote_code=settings.trust_remote_code)
    return model, tokenizer


def build_model(
    assets: Mapping[str, bytes], *, dtype: torch.dtype, device: torch.device | str, trust_remote_code: bool = False
) -> tuple[nn.Module, Any]:
    """An unfilled model and its tokenizer from a snapshot's assets; fill it with `load_weights`.

    Raises: UserError if the assets carry code and `trust_remote_code` is false; CorruptObject without config.json.
    """
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    if _CONFIG not in assets:
        raise CorruptObject(f"a snapshot's assets must hold {_CONFIG}, got {sorted(assets)}")
    with tempfile.TemporaryDirectory(prefix="tba-assets-") as folder:
        write_assets(assets, Path(folder))
        model_config, tokenizer = _read_directory(Path(folder), trust_remote_code, "the snapshot's assets")
        with no_init_weights():
            model: Any = AutoModelForCausalLM.from_config(
                model_config, dtype=dtype, trust_remote_code=trust_remote_code
            )
        model.tie_weights()  # no_init_weights leaves it out
    return _without_dropout(model.to(device)), tokenizer


def write_assets(assets: Mapping[str, bytes], folder: Path) -> None:
    """Write assets as files below `folder`. Raises: CorruptObject if a name would leave it."""
    for name, data in assets.items():
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts:
            raise CorruptObject(f"an asset's name must stay within its folder, got {name!r}")
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)


def weight_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Each distinct parameter once (tied embeddings under their first name), then persistent buffers; sorted names."""
    tensors: dict[str, torch.Tensor] = {n: p.detach() for n, p in model.named_parameters(remove_duplicate=True)}
    parameters = {n for n, _ in model.named_parameters(remove_duplicate=False)}
    seen: set[int] = set()
    for name, value in model.state_dict().items():
        if name not in parameters and id(value) not in seen:
            seen.add(id(value))
            tensors[name] = value
    return dict(sorted(tensors.items()))


@torch.no_grad()
def load_weights(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy `tensors` into the model in place, converting dtype and device.

    Raises: CorruptObject if names or shapes differ from the model's; nothing is changed then.
    """
    own = weight_tensors(model)
    require_fit(own, tensors)
    for name, target in own.items():
        target.copy_(tensors[name])


def require_fit(own: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> None:
    """Raises: CorruptObject if names or shapes of `tensors` differ from those of a model's `own`."""
    missing, foreign = sorted(own.keys() - tensors.keys()), sorted(tensors.keys() - own.keys())
    if missing or foreign:
        raise CorruptObject(f"weights do not fit the model: missing {missing[:3]}, foreign {foreign[:3]}")
    for name, target in own.items():
        if target.shape != tensors[name].shape:
            raise CorruptObject(f"weights do not fit: {name} is {list(tensors[name].shape)}, want {list(target.shape)}")


def eos_token_ids(tokenizer: Any, model_config: Any) -> set[int]:
    """Ids that end a response: the tokenizer's and the model configuration's, which need not agree."""
    ids: set[int] = set()
    text_config = model_config.get_text_config(decoder=True)
    for value in (tokenizer.eos_token_id, getattr(text_config, "eos_token_id", None)):
        if value is not None:
            ids.update([value] if isinstance(value, int) else value)
    return ids


# ---------------------------------------------------------------------------------------------------------------------


@contextmanager
def _local_directory(
    settings: config.Model, patterns: tuple[str, ...], base_dir: Path, token: str | None, open_store: OpenStore
) -> Iterator[Path]:
    """A directory with the model's files; of a remote one those that match `patterns`."""
    scheme, _, rest = settings.uri.partition("://")
    if scheme == "hf":
        yield _download_hf(rest, settings.revision, token, patterns)
    elif scheme == "file":
        directory = base_dir / Path(rest)  # an absolute `rest` wins
        if not directory.is_dir():
            raise UserError(f"model.uri must be a directory, got {settings.uri} ({directory}): make it or correct it")
        yield directory
    elif scheme == "s3":
        with tempfile.TemporaryDirectory(prefix="tba-model-") as folder:
            _download_s3(open_store(settings.uri), Path(folder), patterns)
            yield Path(folder)
    else:
        yield claim_path(settings.uri, "model.uri")


def _download_hf(repository: str, revision: str | None, token: str | None, patterns: tuple[str, ...]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repository, revision=revision, token=token, allow_patterns=list(patterns)))
    except GatedRepoError as e:
        raise UserError(f"model.uri hf://{repository} is gated: accept its terms and set HF_TOKEN") from e
    except LocalEntryNotFoundError as e:
        raise HubUnreachable(
            f"model.uri hf://{repository} could not be reached and is not in the local cache: "
            "check the network and HF_ENDPOINT, or download it elsewhere and use file://"
        ) from e
    except (HfHubHTTPError, HFValidationError) as e:
        raise UserError(f"model.uri hf://{repository} (revision {revision}) was refused ({e}): check both") from e


def _download_s3(store: ObjectStore, folder: Path, patterns: tuple[str, ...]) -> None:
    try:
        infos = [i for i in store.list_after("") if any(PurePosixPath(i.key).match(p) for p in patterns)]
        if not infos:
            raise UserError(f"model.uri {store.uri} holds no model files: it must be the prefix of a model directory")
        for info in infos:
            target = folder / info.key
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(store.get(info.key).data)
    finally:
        store.close()


def _content_revision(directory: Path) -> str:
    """Hash over names and bytes of the files that make the model: the same files anywhere give the same revision."""
    digest = xxhash.xxh3_128()
    for path in sorted({p for pattern in _ALL for p in directory.glob(pattern) if p.is_file()}):
        digest.update(f"{path.relative_to(directory).as_posix()}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
    return f"xxh3:{digest.hexdigest()}"


def _no_weights(uri: str, reason: str) -> UserError:
    return UserError(f"model.uri {uri} has no {_WEIGHTS} weights that load ({reason}): convert it")


def _read_directory(directory: Path, trust_remote_code: bool, what: str) -> tuple[Any, Any]:
    """Configuration and tokenizer. Raises: UserError if one does not load, or the model is no language model."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoTokenizer

    file = directory / _CONFIG
    if not file.is_file():
        raise UserError(f"{what} has no {_CONFIG}: name a directory in Hugging Face format")
    if not trust_remote_code and b'"auto_map"' in file.read_bytes():
        raise UserError(f"{what} needs code from its repository: read it, then set model.trustRemoteCode: true")
    try:
        model_config = AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code, local_files_only=True)
    except (ValueError, OSError) as e:
        raise UserError(
            f"{what} has a {_CONFIG} that transformers does not know ({e}): is the model type right?"
        ) from e
    own_code = "AutoModelForCausalLM" in (getattr(model_config, "auto_map", None) or {})
    if type(model_config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not own_code:
        raise UserError(
            f"{what} is no causal language model that transformers knows, got model type {model_config.model_type!r}: "
            "name one that continues text, token by token"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code, local_files_only=True)
    except (ValueError, OSError) as e:
        raise UserError(f"{what} has no tokenizer that loads ({e}): add tokenizer.json and its config") from e
    return model_config, tokenizer


def _collect_assets(directory: Path, model_config: Any, tokenizer: Any, trust_remote_code: bool) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory(prefix="tba-assets-") as folder:
        model_config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        root = Path(folder)
        assets = {p.relative_to(root).as_posix(): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}
    if trust_remote_code:
        assets.update({p.name: p.read_bytes() for p in sorted(directory.glob("*.py"))})
    assets.pop("generation_config.json", None)
    return assets


def _without_dropout(model: nn.Module) -> nn.Module:
    """Eval mode, and no dropout even if somebody calls train() (gradient checkpointing needs that)."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    # Some layers call functional dropout with a number of their own, or of the configuration.
    for owner in (*model.modules(), getattr(model, "config", None)):
        for name, value in vars(owner).items() if owner is not None else ():
            if isinstance(value, float) and ("dropout" in name or name.endswith("pdrop")):
                setattr(owner, name, 0.0)
    return model.eval()
