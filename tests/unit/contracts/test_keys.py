import pytest
from hypothesis import given
from hypothesis import strategies as st

from tba.contracts import keys

hexes = st.text("0123456789abcdef", min_size=32, max_size=32)
names = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", fullmatch=True)
ten_digits = st.integers(0, 10**10 - 1)
six_digits = st.integers(0, 10**6 - 1)

KEYS = {
    keys.ShardKey: st.builds(keys.ShardKey, ten_digits, names, hexes, ten_digits),
    keys.WeightsKey: st.builds(keys.WeightsKey, ten_digits, six_digits, hexes),
    keys.CheckpointKey: st.builds(keys.CheckpointKey, ten_digits, six_digits, hexes),
    keys.EvalKey: st.builds(keys.EvalKey, ten_digits, six_digits, hexes, six_digits),
    keys.LogKey: st.builds(keys.LogKey, st.sampled_from(["ingest", "metrics"]), six_digits, ten_digits),
}


def test_every_key_class_of_the_module_is_covered_here():
    classes = {v for v in vars(keys).values() if isinstance(v, type) and v.__name__.endswith("Key")}
    assert classes == set(KEYS)


@pytest.mark.parametrize("kind", KEYS, ids=lambda k: k.__name__)
@given(data=st.data())
def test_every_key_survives_the_way_to_its_path_and_back(kind, data):
    key = data.draw(KEYS[kind])
    assert kind.parse(key.path) == key


@pytest.mark.parametrize("kind", KEYS, ids=lambda k: k.__name__)
@given(data=st.data())
def test_key_order_is_numeric_order(kind, data):
    first, second = data.draw(KEYS[kind]), data.draw(KEYS[kind])
    numbers = [
        [getattr(k, f) for f in ("kind", "window", "version", "step", "epoch") if hasattr(k, f)]
        for k in (first, second)
    ]
    if numbers[0] != numbers[1]:
        assert (first.path < second.path) == (numbers[0] < numbers[1])


@given(st.one_of(*KEYS.values()))
def test_a_path_is_of_one_kind_only(key):
    for kind in KEYS:
        if kind is not type(key):
            with pytest.raises(ValueError, match="not a"):
                kind.parse(key.path)


def test_a_shard_key_is_spelled_as_documented():
    key = keys.ShardKey(7, "searcher-0", "0a" * 16, 12)
    assert key.path == f"shards/0000000007/searcher-0.{'0a' * 16}.0000000012.arrow"


@pytest.mark.parametrize("path", ["shards/7/a.b.c.arrow", "weights/", "", "metrics/000001/1.jsonl", "eval/../x"])
def test_a_foreign_path_is_refused_by_every_kind(path):
    for kind in KEYS:
        with pytest.raises(ValueError, match="not a"):
            kind.parse(path)


@pytest.mark.parametrize("searcher", ["", "A", "a.b", "-a", "a/b", "a" * 64])
def test_a_searcher_name_that_would_change_the_key_is_refused(searcher):
    with pytest.raises(ValueError, match="searcher must match"):
        keys.ShardKey(0, searcher, "0a" * 16, 0)


@pytest.mark.parametrize("number", [-1, 10**10])
def test_a_number_too_wide_for_its_digits_is_refused(number):
    with pytest.raises(ValueError, match="must be in"):
        keys.pin_key(number)


@given(ten_digits)
def test_window_of_a_prefix_is_read_even_if_the_file_name_is_foreign(window):
    assert keys.parse_window(f"{keys.window_prefix(window)}whatever") == window


def test_two_nonces_differ():
    assert keys.new_nonce() != keys.new_nonce()
    assert len(keys.new_nonce()) == 32


@given(st.one_of(*KEYS.values()))
def test_every_path_of_the_module_names_an_object_of_a_run(key):
    assert keys.names_run_object(key.path)


@pytest.mark.parametrize(
    "path", [keys.prompts_key("0" * 64), keys.reward_key("0" * 64), keys.pin_key(3), f"probe/{'0' * 32}/race"]
)
def test_plain_keys_name_objects_of_a_run(path):
    assert keys.names_run_object(path)


@pytest.mark.parametrize(
    "path", [keys.LATEST, keys.RUN, "pins/3", "prompts/train.arrow", "probe/x", "shards/", "x/" + keys.pin_key(3)]
)
def test_what_anybody_may_have_written_names_no_object_of_a_run(path):
    assert not keys.names_run_object(path)
