"""Keys from a mounted Secret: read again when they change, never half old and half new, never a value in an error."""

import os

import pytest
from structlog.testing import capture_logs

from tba.contracts.errors import UserError
from tba.store.access import find_credentials
from tba.store.key_files import KeyFiles


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def write(folder, **values: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in values.items():
        (folder / f"AWS_{name}").write_text(value)


def swap(root, number: int, **values: str) -> None:
    """As a kubelet does it: a new folder, then one rename of the link."""
    write(root / f"..{number}", **values)
    (root / "..next").symlink_to(f"..{number}")
    (root / "..next").rename(root / "..data")
    for name in values:
        link = root / f"AWS_{name}"
        if not link.is_symlink():
            link.symlink_to(f"..data/AWS_{name}")


def keys(found) -> tuple:
    return found["access_key_id"], found["secret_access_key"], found["token"]


def test_values_lose_the_newline_that_editors_leave_and_a_token_is_optional(tmp_path):
    write(tmp_path, ACCESS_KEY_ID="a\n", SECRET_ACCESS_KEY="s\n")
    assert keys(KeyFiles(tmp_path)()) == ("a", "s", None)
    write(tmp_path, SESSION_TOKEN="t")
    assert keys(KeyFiles(tmp_path)()) == ("a", "s", "t")


def test_a_rotated_secret_is_used_a_second_later(tmp_path):
    clock = Clock()
    swap(tmp_path, 1, ACCESS_KEY_ID="old", SECRET_ACCESS_KEY="s1")
    files = KeyFiles(tmp_path, clock=clock)
    swap(tmp_path, 2, ACCESS_KEY_ID="new", SECRET_ACCESS_KEY="s2")
    clock.now = 0.5
    assert keys(files()) == ("old", "s1", None), "looked at once a second at most"
    clock.now = 1.5
    assert keys(files()) == ("new", "s2", None)


def test_a_change_that_leaves_no_stamp_is_seen_within_a_minute(tmp_path):
    clock = Clock()
    write(tmp_path, ACCESS_KEY_ID="old", SECRET_ACCESS_KEY="s")
    files = KeyFiles(tmp_path, clock=clock)
    path = tmp_path / "AWS_ACCESS_KEY_ID"
    before = path.stat()
    path.write_text("new")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    clock.now = 2.0
    assert keys(files())[0] == "old"
    clock.now = 61.0
    assert keys(files())[0] == "new"


def test_keys_that_disappear_while_a_process_runs_are_kept_and_told(tmp_path):
    clock = Clock()
    write(tmp_path, ACCESS_KEY_ID="a", SECRET_ACCESS_KEY="hidden")
    files = KeyFiles(tmp_path, clock=clock)
    (tmp_path / "AWS_SECRET_ACCESS_KEY").unlink()
    clock.now = 2.0
    with capture_logs() as logs:
        assert keys(files()) == ("a", "hidden", None)
    assert "AWS_SECRET_ACCESS_KEY" in logs[0]["error"] and "hidden" not in str(logs)


@pytest.mark.parametrize(
    ("values", "missing"),
    [({}, "AWS_ACCESS_KEY_ID"), ({"ACCESS_KEY_ID": "a"}, "AWS_SECRET_ACCESS_KEY"), (
        {"ACCESS_KEY_ID": "\n", "SECRET_ACCESS_KEY": "hidden"}, "AWS_ACCESS_KEY_ID")],
)  # fmt: skip
def test_a_secret_without_its_keys_is_refused_with_what_it_has(tmp_path, values, missing):
    write(tmp_path, accessKey="x", **values)
    with pytest.raises(UserError, match=f"{tmp_path} has no {missing}.*AWS_accessKey.*AWS_SESSION_TOKEN") as caught:
        KeyFiles(tmp_path)
    assert "hidden" not in str(caught.value)


def test_a_directory_that_is_not_there_is_the_same_mistake(tmp_path):
    with pytest.raises(UserError, match="got the files none"):
        KeyFiles(tmp_path / "none")


def test_the_directory_comes_before_the_environment_and_may_rotate(tmp_path):
    write(tmp_path, ACCESS_KEY_ID="a", SECRET_ACCESS_KEY="s")
    environment = {"AWS_ACCESS_KEY_ID": "e", "AWS_SECRET_ACCESS_KEY": "e"}
    fixed = find_credentials(environment)
    assert (fixed.rotation.first_seconds, fixed.rotation.later_seconds) == (0, 0)
    found = find_credentials({**environment, "TBA_CREDENTIALS_DIR": str(tmp_path)})
    assert keys(found()) == ("a", "s", None)
    assert 5 <= found.rotation.first_seconds < 60 < found.rotation.later_seconds <= 600
    assert "Secret that storage.credentials names" in found.rotation.where
