"""The host's cache: one read from storage for all, never a wrong byte, never more than its share of the disk."""

import fcntl
import os
import threading
import time

import pytest
from support.memory_store import MemoryStore
from support.weights_chain import Chain, same

from tba.contracts.errors import CorruptObject, UserError
from tba.contracts.records import FileEntry
from tba.hashing import xxh3_128
from tba.snapshots import SnapshotFetcher
from tba.snapshots.hostcache import VARIABLE, HostCache

DATA = bytes(range(200))
RUN = "s3://bucket/run"
ENTRY = FileEntry(name="f", size=len(DATA), hash=xxh3_128(DATA))


class Source:
    """What storage holds; counts reads."""

    def __init__(self, data: bytes = DATA) -> None:
        self.data, self.reads = data, 0

    def into(self, target: memoryview):
        def fetch() -> None:
            self.reads += 1
            target[:] = self.data

        return fetch


def read(cache: HostCache, source: Source, entry: FileEntry = ENTRY, run: str = RUN) -> bytes:
    target = memoryview(bytearray(entry.size))
    cache.read(run, entry, target, source.into(target))
    return bytes(target)


def test_what_one_searcher_read_the_others_take_from_the_directory(tmp_path):
    source = Source()
    assert all(read(HostCache(tmp_path), source) == DATA for _ in range(3))
    assert source.reads == 1


@pytest.mark.parametrize("damage", [b"", DATA[:-1], DATA + b"x", b"\1" + DATA[1:]])
def test_a_cut_or_changed_file_is_found_out_and_replaced(tmp_path, damage):
    cache, source = HostCache(tmp_path), Source()
    read(cache, source)
    (file,) = tmp_path.glob(f"*{ENTRY.hash}.weights")
    file.write_bytes(damage)
    assert read(cache, source) == DATA and source.reads == 2
    assert read(cache, source) == DATA and source.reads == 2


def test_a_file_that_a_killed_searcher_left_half_written_is_never_read(tmp_path):
    cache, source = HostCache(tmp_path), Source()
    read(cache, source)
    (file,) = tmp_path.glob("*.weights")
    file.rename(file.with_suffix(".partial")).write_bytes(DATA[:50])
    assert read(cache, source) == DATA and source.reads == 2
    assert sorted(p.suffix for p in tmp_path.iterdir()) == ["", ".weights"]


def test_of_searchers_that_come_at_once_one_reads(tmp_path):
    source, inside, go = Source(), threading.Event(), threading.Event()
    found: list[bytes] = []

    def slow(target: memoryview):
        def fetch() -> None:
            inside.set()
            assert go.wait(10.0)
            source.into(target)()

        return fetch

    def first() -> None:
        target = memoryview(bytearray(ENTRY.size))
        HostCache(tmp_path).read(RUN, ENTRY, target, slow(target))
        found.append(bytes(target))

    threads = [threading.Thread(target=first)]
    threads[0].start()
    assert inside.wait(10.0)
    threads += [threading.Thread(target=lambda: found.append(read(HostCache(tmp_path), source))) for _ in range(3)]
    for thread in threads[1:]:
        thread.start()
    go.set()
    for thread in threads:
        thread.join(10.0)
    assert found == [DATA] * 4 and source.reads == 1


def test_a_holder_that_hangs_is_not_waited_for_for_ever(tmp_path):
    cache, source = HostCache(tmp_path, lock_seconds=0.01), Source()
    with (tmp_path / f"lock-{ENTRY.hash[0]}").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert read(cache, source) == DATA
    assert not list(tmp_path.glob("*.weights")), "only who has the lock writes"
    assert read(cache, source) == DATA and list(tmp_path.glob("*.weights"))


def test_what_storage_cannot_give_is_not_kept(tmp_path):
    cache = HostCache(tmp_path)

    def broken() -> None:
        raise CorruptObject("flipped")

    with pytest.raises(CorruptObject):
        cache.read(RUN, ENTRY, memoryview(bytearray(ENTRY.size)), broken)
    assert not list(tmp_path.glob("*.weights"))


def test_a_directory_that_cannot_be_written_costs_a_read_and_nothing_else(tmp_path):
    cache, source = HostCache(tmp_path / "gone"), Source()
    (tmp_path / "gone").rmdir()
    assert read(cache, source) == DATA and read(cache, source) == DATA and source.reads == 2
    cache.prune(RUN, 0)


def test_a_hash_that_is_no_hash_never_becomes_a_path(tmp_path):
    cache, source = HostCache(tmp_path / "cache"), Source()
    entry = ENTRY.model_copy(update={"hash": "../../escape"})
    assert read(cache, source, entry) == DATA
    assert not list((tmp_path / "cache").iterdir()) and not (tmp_path / "escape.weights").exists()


def test_the_longest_unused_files_go_first_and_abandoned_ones_too(tmp_path):
    cache = HostCache(tmp_path)
    entries = fill(cache, 4)
    (tmp_path / "x.partial").write_bytes(b"x")
    os.utime(tmp_path / "x.partial", (1000.0, 1000.0))
    cache.prune(RUN, 250)
    left = {p.stem[-32:] for p in tmp_path.glob("*.weights")}
    assert left == {entries[2].hash, entries[3].hash} and not list(tmp_path.glob("*.partial"))


def test_a_run_makes_room_at_no_other_runs_expense_unless_that_has_ended(tmp_path):
    cache, source = HostCache(tmp_path), Source()
    read(cache, source, run="s3://bucket/other")
    fill(cache, 2)
    cache.prune(RUN, 0)
    (file,) = tmp_path.glob("*.weights")
    read(cache, source, run="s3://bucket/other")
    assert source.reads == 1
    os.utime(file, (1000.0, 1000.0))
    cache.prune(RUN, 0)
    assert not file.exists()


def fill(cache: HostCache, count: int) -> list[FileEntry]:
    """Files of 100 bytes, each last used a second after the one before."""
    entries = []
    for number in range(count):
        data = bytes([number]) * 100
        entries.append(FileEntry(name="f", size=100, hash=xxh3_128(data)))
        read(cache, Source(data), entries[-1])
        (file,) = cache._directory.glob(f"*{entries[-1].hash}.weights")
        used = time.time() - 100.0 + number
        os.utime(file, (used, used))
    return entries


def test_the_directory_is_this_users_alone(tmp_path):
    HostCache(tmp_path / "new")
    assert (tmp_path / "new").stat().st_mode & 0o077 == 0
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="name a directory"):
        HostCache(tmp_path / "file")
    if os.geteuid() == 0:
        (tmp_path / "foreign").mkdir()
        os.chown(tmp_path / "foreign", 12345, 12345)
        with pytest.raises(UserError, match="belongs to user 12345"):
            HostCache(tmp_path / "foreign")


def test_it_is_off_unless_the_environment_names_a_directory(tmp_path, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert HostCache.from_environment() is None
    monkeypatch.setenv(VARIABLE, str(tmp_path / "c"))
    assert HostCache.from_environment() is not None and (tmp_path / "c").is_dir()


def test_a_second_searcher_of_the_host_reads_manifests_alone(tmp_path):
    store = MemoryStore()
    keys = Chain(store).up_to(3)
    for fetched in (SnapshotFetcher(cache=HostCache(tmp_path)), SnapshotFetcher(cache=HostCache(tmp_path))):
        store.calls.clear()
        for version in (1, 3):
            assert same(fetched(store, keys[version]).tensors, version)
    assert not [key for call, key in store.calls if call == "get" and key.endswith(".safetensors")]
