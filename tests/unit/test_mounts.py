"""Mounted files are found by the names in the job; what is missing is named with its remedy."""

import pytest

from tba.contracts.config import ConfigMapRef
from tba.contracts.errors import UserError
from tba.mounts import claim_path, config_map_file

REFERENCE = ConfigMapRef(name="rewards", key="mine.py")


def test_a_key_is_a_file_in_the_folder_of_its_config_map(tmp_path, monkeypatch):
    monkeypatch.setenv("TBA_CONFIG_MAPS_DIR", str(tmp_path))
    (tmp_path / "rewards").mkdir()
    (tmp_path / "rewards" / "mine.py").touch()
    assert config_map_file(REFERENCE, "task.reward") == tmp_path / "rewards" / "mine.py"


def test_a_key_that_the_config_map_lacks_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("TBA_CONFIG_MAPS_DIR", str(tmp_path))
    with pytest.raises(UserError, match=r"task.reward.configMapRef rewards/mine.py: no file .* the key mine.py"):
        config_map_file(REFERENCE, "task.reward")


def test_outside_of_a_cluster_there_is_neither(monkeypatch):
    monkeypatch.delenv("TBA_CONFIG_MAPS_DIR", raising=False)
    monkeypatch.delenv("TBA_PVC_DIR", raising=False)
    with pytest.raises(
        UserError, match="spec.task.prompts.configMapRef rewards/mine.py: ConfigMaps exist in a cluster"
    ):
        config_map_file(REFERENCE, "spec.task.prompts")
    with pytest.raises(UserError, match="model.uri: pvc:// exists in a cluster only, got pvc://claim/model"):
        claim_path("pvc://claim/model", "model.uri")


@pytest.mark.parametrize(("uri", "below"), [("pvc://claim/a/b", "claim/a/b"), ("pvc://claim", "claim")])
def test_a_path_of_a_claim_is_below_its_mount(tmp_path, monkeypatch, uri, below):
    monkeypatch.setenv("TBA_PVC_DIR", str(tmp_path))
    with pytest.raises(UserError, match="the volume claim claim has no"):
        claim_path(uri, "model.uri")
    (tmp_path / below).mkdir(parents=True)
    assert claim_path(uri, "model.uri") == tmp_path / below
