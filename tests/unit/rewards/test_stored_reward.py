"""A reward's own code travels through the bucket, unchanged or not at all."""

import pytest
from support.memory_store import MemoryStore

from tba.contracts.config import ConfigMapRef, Reward
from tba.contracts.errors import CorruptObject, UserError
from tba.rewards import names
from tba.rewards.sandbox import reward_source
from tba.rewards.stored import get_reward_code, put_reward_code

CODE = "def reward(prompt, response, answer):\n    return 1.0  # ü\n"
MINE = Reward(config_map_ref=ConfigMapRef(name="mine", key="r.py"), parameters={"scale": 2})


def test_what_was_put_is_what_is_read_and_putting_it_twice_is_once():
    store = MemoryStore()
    key = put_reward_code(store, CODE)
    assert put_reward_code(store, CODE) == key and list(store.objects) == [key]
    assert key.startswith("rewards/") and get_reward_code(store, key) == CODE


def test_changed_bytes_are_never_run():
    store = MemoryStore()
    key = put_reward_code(store, CODE)
    store.objects[key].data = b"import os"
    with pytest.raises(CorruptObject, match="the bytes were changed"):
        get_reward_code(store, key)


def test_a_reward_of_the_package_has_no_code_in_the_bucket():
    assert get_reward_code(MemoryStore(), None) is None


def test_given_code_needs_no_file(tmp_path):
    source = reward_source(MINE, None, CODE)
    assert (source.kind, source.text, source.label, source.parameters) == ("file", CODE, "r.py", {"scale": 2})


def test_in_a_cluster_the_file_is_that_of_the_mounted_config_map(tmp_path, monkeypatch):
    (tmp_path / "r.py").write_text("beside the job file")
    (tmp_path / "maps" / "mine").mkdir(parents=True)
    monkeypatch.setenv("TBA_CONFIG_MAPS_DIR", str(tmp_path / "maps"))
    with pytest.raises(UserError, match="no file .*maps/mine/r.py"):
        reward_source(MINE, tmp_path)
    (tmp_path / "maps" / "mine" / "r.py").write_text(CODE)
    assert reward_source(MINE, tmp_path).text == CODE


def test_the_machinery_is_no_reward():
    assert not {"stored", "orphans", "sandbox"} & set(names())
