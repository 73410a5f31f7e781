"""What a cluster mounts into the trainer's pod: files of ConfigMaps, and volume claims. Elsewhere there is neither."""

import os
from pathlib import Path

from tba.contracts.config import ConfigMapRef
from tba.contracts.errors import UserError

CONFIG_MAPS, CLAIMS = "TBA_CONFIG_MAPS_DIR", "TBA_PVC_DIR"


def config_map_file(reference: ConfigMapRef, field: str) -> Path:
    """The file of a ConfigMap's key. Raises: UserError that names `field`."""
    name = f"{field}.configMapRef {reference.name}/{reference.key}"
    root = os.environ.get(CONFIG_MAPS)
    if not root:
        raise UserError(
            f"{name}: ConfigMaps exist in a cluster only, got no {CONFIG_MAPS}: set {field}.uri here, "
            f"or {CONFIG_MAPS} to a directory that holds {reference.name}/{reference.key}"
        )
    path = Path(root) / reference.name / reference.key
    if not path.is_file():
        raise UserError(f"{name}: no file {path}: give the ConfigMap {reference.name} the key {reference.key}")
    return path


def claim_path(uri: str, field: str) -> Path:
    """The path of a pvc://claim/path URI. Raises: UserError that names `field`."""
    root = os.environ.get(CLAIMS)
    if not root:
        raise UserError(f"{field}: pvc:// exists in a cluster only, got {uri}: use hf://, s3:// or file:// here")
    claim, _, rest = uri.removeprefix("pvc://").partition("/")
    path = Path(root) / claim / rest
    if not path.exists():
        raise UserError(f"{field}: the volume claim {claim} has no {rest or 'content'}, got {uri} ({path}): correct it")
    return path
