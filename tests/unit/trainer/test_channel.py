"""What two threads of different ranks say to each other arrives in order, or an error says that nothing came."""

import threading

import pytest
from torch.distributed import HashStore, TCPStore

from tba.trainer.channel import PIECE_CHARS, Channel


def ends(store: HashStore | None = None, **more) -> tuple[Channel, Channel]:
    store = store or HashStore()
    return Channel(store, own="rank0", other="rank1", **more), Channel(store, own="rank1", other="rank0", **more)


def test_messages_arrive_in_order_and_each_way_on_its_own():
    here, there = ends()
    for text in ("a", "b", "", "ü" * 100_000):
        here.send(text)
    there.send("answer")
    assert [there.receive(1.0) for _ in range(4)] == ["a", "b", "", "ü" * 100_000]
    assert here.receive(1.0) == "answer"


def test_a_message_that_was_read_is_no_longer_held():
    store = HashStore()
    here, there = ends(store)
    here.send("a")
    before = store.num_keys()
    there.receive(1.0)
    assert store.num_keys() == before - 1


@pytest.mark.parametrize("size", [PIECE_CHARS - 1, PIECE_CHARS, PIECE_CHARS + 1, 9 * PIECE_CHARS])
def test_a_message_larger_than_the_store_takes_at_once_arrives_and_leaves_nothing_there(size):
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    here, there = ends(store.clone())[0], ends(store.clone())[1]
    empty = store.num_keys()
    for text in ("a" * size, "ü" * size, "after"):
        here.send(text)
        assert there.receive(10.0) == text
    assert store.num_keys() == empty


def test_ranks_do_not_hear_what_is_meant_for_others():
    store = HashStore()
    one, two = (Channel(store, own="rank0", other=name) for name in ("rank1", "rank2"))
    two.send("for two")
    one.send("for one")
    assert Channel(store, own="rank1", other="rank0").receive(1.0) == "for one"


def test_silence_is_an_error_only_where_a_limit_was_given():
    here, there = ends(wait_seconds=0.01)  # a long wait is several requests to the store
    with pytest.raises(TimeoutError, match=r"no message rank1>rank0 within 0 s"):
        here.receive(0.05)
    heard: list[str] = []
    listener = threading.Thread(target=lambda: heard.append(there.receive()))
    listener.start()
    listener.join(0.1)
    assert listener.is_alive(), "it waits as long as it takes"
    here.send("late")
    listener.join(10.0)
    assert heard == ["late"]
