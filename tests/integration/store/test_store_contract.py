"""What every store promises, asked of a directory and of a real S3 server alike."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from tba.contracts.errors import CorruptObject
from tba.store.probe import probe, require
from tba.store.protocol import MAX_CAS_BYTES, AlreadyExists, Conflict, NotFound


def race(action: Callable[[int], None], threads: int = 12) -> None:
    barrier = threading.Barrier(threads)

    def run(index: int) -> None:
        barrier.wait(30)
        action(index)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(run, range(threads)))


def test_what_was_put_is_what_is_read(store):
    for key, data in {"empty": b"", "a/small": b"x", "a/b/binary": bytes(range(256)) * 100}.items():
        store.put_once(key, data)
        assert store.get(key).data == data
        info = store.head(key)
        assert (info.key, info.size, info.etag) == (key, len(data), store.get(key).etag)
        assert abs(info.last_modified - store.now()) < 60


def test_keys_with_odd_characters_survive(store):
    keys = ["odd/a b", "odd/é", "odd/q=1&x+y", "odd/name:@~", "odd/(1),*!'[]"]
    for key in keys:
        store.put_once(key, key.encode())
        target = bytearray(len(key.encode()))
        store.read_into(key, memoryview(target))
        assert store.get(key).data == bytes(target) == key.encode()
    assert sorted(info.key for info in store.list_after("odd/")) == sorted(keys)


@pytest.mark.parametrize("key", ["", "/a", "a/", "a//b", "a/../b", "./a", ".tba/x", "a\nb", "a?b", "100%"])
def test_malformed_keys_are_refused(store, key):
    with pytest.raises(ValueError, match="not an object key"):
        store.put_once(key, b"")


def test_a_missing_object_is_not_found(store):
    store.put_once("folder/object", b"1")
    target = memoryview(bytearray(4))
    for key in ("nothing", "folder/nothing", "folder"):
        for read in (store.get, store.head, lambda key: store.get_if_changed(key, "etag")):
            with pytest.raises(NotFound):
                read(key)
        with pytest.raises(NotFound):
            store.read_into(key, target)


def test_putting_equal_bytes_again_succeeds_and_other_bytes_are_refused(store):
    store.put_once("object", b"first")
    store.put_once("object", memoryview(bytearray(b"first")))
    for other in (b"other", b"", b"first and more"):
        with pytest.raises(AlreadyExists):
            store.put_once("object", other)
    assert store.get("object").data == b"first"


def test_putting_a_large_object_again_compares_every_byte(store):
    data = bytearray(os.urandom(12 << 20))
    store.put_once("large", memoryview(data))
    store.put_once("large", data)
    data[-1] ^= 1
    with pytest.raises(AlreadyExists):
        store.put_once("large", data)


def create_concurrently(store, key: str, size: int, threads: int) -> list[int]:
    winners: list[int] = []

    def create(index: int) -> None:
        try:
            store.put_once(key, bytes([index]) * size)
            winners.append(index)
        except AlreadyExists:
            pass

    race(create, threads)
    return winners


def test_of_twelve_concurrent_creations_exactly_one_wins(store):
    for size in (1, 100_000, 5 << 20):  # the last is the largest that is one request with these settings
        key = f"race/{size}"
        (winner,) = create_concurrently(store, key, size, 12 if size < 1 << 20 else 4)
        assert store.get(key).data == bytes([winner]) * size


def test_of_concurrent_creations_of_a_large_object_exactly_one_wins_in_a_directory(local_store):
    (winner,) = create_concurrently(local_store, "large", 12 << 20, 4)
    assert local_store.get("large").data == bytes([winner]) * (12 << 20)


def test_concurrent_creations_in_parts_leave_one_whole_object_of_a_winner(s3_store):
    """No more than that: SeaweedFS 4.48 lets several conditional completions succeed (ObjectStore.put_once)."""
    winners = create_concurrently(s3_store, "large", 12 << 20, 4)
    data = s3_store.get("large").data
    assert data == data[:1] * (12 << 20)
    assert data[0] in winners
    with pytest.raises(AlreadyExists):
        s3_store.put_once("large", bytes([99]) * (12 << 20))


def test_concurrent_swaps_lose_no_update(store):
    store.cas("counter", b"0", None)

    def increment(index: int) -> None:
        done = 0
        while done < 5:
            current = store.get("counter")
            try:
                store.cas("counter", b"%d" % (int(current.data) + 1), current.etag)
                done += 1
            except Conflict:
                pass

    race(increment, 6)
    assert store.get("counter").data == b"30"


def test_a_swap_needs_the_current_etag(store):
    with pytest.raises(Conflict):
        store.cas("latest", b"x", "0123456789abcdef0123456789abcdef")
    first = store.cas("latest", b"1", None)
    with pytest.raises(Conflict):
        store.cas("latest", b"2", None)
    second = store.cas("latest", b"2", first)
    with pytest.raises(Conflict):
        store.cas("latest", b"3", first)
    assert store.get("latest").data == b"2"
    assert store.get("latest").etag == second == store.head("latest").etag
    with pytest.raises(ValueError, match="cas takes at most"):
        store.cas("latest", bytes(MAX_CAS_BYTES + 1), second)


def test_only_a_change_is_sent_again(store):
    etag = store.cas("latest", b"1", None)
    assert store.get_if_changed("latest", etag) is None
    assert store.get_if_changed("latest", None).data == b"1"
    store.cas("latest", b"2", etag)
    assert store.get_if_changed("latest", etag).data == b"2"


def test_a_large_object_is_read_straight_into_the_callers_memory(store):
    data = os.urandom((40 << 20) + 123)
    store.put_once("large", memoryview(data))
    target = bytearray(len(data) + 2)
    store.read_into("large", memoryview(target)[1:-1])
    assert target[0] == target[-1] == 0
    assert target[1:-1] == data
    middle = bytearray(11 << 20)
    store.read_into("large", memoryview(middle), offset=12_345_678)
    assert middle == data[12_345_678 : 12_345_678 + len(middle)]


def test_a_read_beyond_the_end_is_corruption_and_not_a_short_read(store):
    store.put_once("object", bytes(1000))
    for size, offset in ((1001, 0), (1, 1000), (12 << 20, 0), (500, 501)):
        with pytest.raises(CorruptObject):
            store.read_into("object", memoryview(bytearray(size)), offset=offset)
    with pytest.raises(ValueError, match="writable"):
        store.read_into("object", memoryview(bytes(10)))
    store.read_into("object", memoryview(bytearray()))


def test_a_listing_of_many_pages_is_complete_and_in_order(store):
    keys = [f"shards/{7:010d}/s.{i:010d}.arrow" for i in range(1030)]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda key: store.put_once(key, b"1"), keys))
    store.put_once("shards/0000000008/x", b"1")
    store.put_once("shards-other", b"1")
    assert [info.key for info in store.list_after("shards/0000000007/")] == keys
    assert [info.key for info in store.list_after("shards/0000000007/", keys[7])] == keys[8:]
    assert list(store.list_after("shards/0000000007/", keys[-1])) == []
    assert [info.key for info in store.list_after("shards/")] == [*keys, "shards/0000000008/x"]
    store.delete([*keys[:1025], "never/written"])
    assert [info.key for info in store.list_after("shards/0000000007/")] == keys[1025:]
    with pytest.raises(ValueError, match="prefix"):
        store.list_after("shards/00")


def test_a_cursor_may_name_a_key_that_is_gone(store):
    for name in ("a", "c/1", "c/2", "d"):
        store.put_once(f"x/{name}", b"1")
    assert [info.key for info in store.list_after("x/", "x/b")] == ["x/c/1", "x/c/2", "x/d"]
    assert [info.key for info in store.list_after("x/", "x/c/1")] == ["x/c/2", "x/d"]
    assert [info.key for info in store.list_after("", "x/c/2")] == ["x/d"]
    assert list(store.list_after("y/")) == []


def test_readers_never_see_half_a_swap(store):
    bodies = [bytes([i]) * 60_000 for i in range(20)]
    etag = store.cas("latest", bodies[0], None)
    stop = threading.Event()
    torn = []

    def read(_: int) -> None:
        while not stop.is_set():
            data = store.get("latest").data
            if len(data) != 60_000 or data.count(data[:1]) != 60_000:
                torn.append(data)

    with ThreadPoolExecutor(3) as pool:
        readers = [pool.submit(read, i) for i in range(3)]
        for body in bodies[1:]:
            etag = store.cas("latest", body, etag)
        stop.set()
        for reader in readers:
            reader.result()
    assert not torn


def test_the_probe_passes_and_leaves_nothing_behind(store):
    results = probe(store)
    require(results)
    # The one known weakness of SeaweedFS 4.48, which shows in most but not all runs.
    assert {r.name for r in results if not r.ok} <= {"create_in_parts_race"}
    assert list(store.list_after("")) == []
