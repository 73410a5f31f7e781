"""When an object in the API server lacks what its manifest asks for."""

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tba_operator.drift import differs, quantity

SCALARS = st.one_of(st.booleans(), st.integers(-5, 5), st.text(max_size=4))
MANIFESTS = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    max_leaves=12,
)


def test_what_the_api_server_adds_is_no_drift():
    assert not differs(
        {"spec": {"ports": [{"port": 80}]}}, {"spec": {"ports": [{"port": 80, "protocol": "TCP"}], "x": 1}}
    )


def test_a_changed_removed_or_added_element_is_drift():
    assert differs({"data": {"live.json": "{}"}}, {"data": {"live.json": "{ }"}})
    assert differs({"data": {"live.json": "{}"}}, {"data": {}})
    assert differs({"spec": {"ingress": [{"from": []}]}}, {"spec": {"ingress": []}})
    assert differs({"spec": {"ingress": []}}, {"spec": {"ingress": [{}]}})
    assert differs({"spec": {"ports": [1, 2]}}, {"spec": {"ports": [2, 1]}}), "lists are ordered"
    assert differs({"a": {"b": 1}}, {"a": "b"})
    assert differs({"a": ["b"]}, {"a": "b"})


def test_what_is_asked_for_empty_may_be_absent():
    assert not differs({"a": {}, "b": [], "c": "", "d": None}, {})
    assert not differs({"resources": {}}, {"resources": {"limits": {"x": "1"}}}), "a subset"
    assert differs({"c": ""}, {"c": "x"})


def test_a_selector_that_asks_for_more_is_drift_for_it_selects_less():
    found = {"podSelector": {"matchLabels": {"x": "y"}}}
    assert differs({"podSelector": {}}, found)
    assert differs({"matchLabels": {"x": "y"}}, {"matchLabels": {"x": "y", "z": "y"}})
    assert not differs({"podSelector": {"matchLabels": {}}}, {"podSelector": {}})
    assert not differs(found, copy.deepcopy(found))


def test_pull_secrets_that_a_platform_adds_are_no_drift():
    ours = {"imagePullSecrets": [{"name": "a"}, {"name": "b"}]}
    assert not differs(ours, {"imagePullSecrets": [{"name": "platform"}, {"name": "b"}, {"name": "a"}]})
    assert differs(ours, {"imagePullSecrets": [{"name": "a"}, {"name": "platform"}]})
    assert differs(ours, {})


def test_a_switch_is_not_a_number():
    assert differs({"automount": False}, {"automount": 0})
    assert differs({"automount": False}, {})


@pytest.mark.parametrize(
    ("asked", "found"), [("1000m", "1"), ("1Gi", 1073741824), (1, "1"), ("0.5", "500m"), ("1e3", "1k")]
)
def test_quantities_are_compared_by_value(asked, found):
    assert not differs({"resources": {"limits": {"x": asked}}}, {"resources": {"limits": {"x": found}}})
    assert differs({"labels": {"x": asked}}, {"labels": {"x": found}}), "elsewhere a text is a text"


def test_other_quantities_and_words_differ():
    assert differs({"limits": {"memory": "1Gi"}}, {"limits": {"memory": "1G"}})
    assert differs({"limits": {"memory": "much"}}, {"limits": {"memory": "more"}})
    assert (quantity("much"), quantity("NaN"), quantity("2Ki")) == (None, None, 2048)


@given(MANIFESTS)
def test_nothing_differs_from_itself(manifest):
    assert not differs(manifest, copy.deepcopy(manifest))


@given(st.dictionaries(st.text(max_size=3), MANIFESTS, min_size=1), st.dictionaries(st.text(max_size=3), MANIFESTS))
def test_additions_are_never_drift(desired, additions):
    assert not differs(desired, additions | desired)
