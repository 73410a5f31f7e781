"""A user's podTemplate over ours."""

import copy

from hypothesis import given
from hypothesis import strategies as st

from tba_operator.overlay import overlay

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(0, 3) | st.sampled_from(["a", "b"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["name", "env", "containers", "volumes", "ports", "tolerations", "httpGet", "exec", "x"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


def nulls(value):
    if isinstance(value, dict):
        return any(v is None or nulls(v) for v in value.values())
    return isinstance(value, list) and any(v is None or nulls(v) for v in value)


def test_a_mapping_merges_deeply_and_the_user_wins():
    assert overlay({"a": {"b": 1, "c": 2}}, {"a": {"c": 3}, "d": 4}) == {"a": {"b": 1, "c": 3}, "d": 4}


def test_null_removes_our_value():
    assert overlay({"spec": {"livenessProbe": {"a": 1}, "x": 1}}, {"spec": {"livenessProbe": None}}) == {
        "spec": {"x": 1}
    }


def test_containers_merge_by_name_and_new_ones_follow():
    ours = {"containers": [{"name": "trainer", "image": "a", "args": ["trainer"]}]}
    users = {"containers": [{"name": "proxy", "image": "p"}, {"name": "trainer", "image": "b"}]}
    assert overlay(ours, users)["containers"] == [
        {"name": "trainer", "image": "b", "args": ["trainer"]},
        {"name": "proxy", "image": "p"},
    ]


def test_a_variable_is_replaced_as_a_whole_since_value_and_value_from_exclude_each_other():
    reference = {"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
    assert overlay({"env": [{"name": "A", "value": "1"}]}, {"env": [reference]}) == {"env": [reference]}


def test_a_variable_that_stands_twice_stands_once_with_the_last_value():
    twice = {"env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}, {"name": "A", "value": "3"}]}
    assert overlay({}, twice)["env"] == [{"name": "A", "value": "3"}, {"name": "B", "value": "2"}]


def test_a_volume_keeps_the_users_source_only_and_what_we_said_of_it():
    ours = {"volumes": [{"name": "tmp", "emptyDir": {}}, {"name": "dshm", "emptyDir": {"medium": "Memory"}}]}
    users = {
        "volumes": [{"name": "tmp", "hostPath": {"path": "/x"}}, {"name": "dshm", "emptyDir": {"sizeLimit": "8Gi"}}]
    }
    assert overlay(ours, users)["volumes"] == [
        {"name": "tmp", "hostPath": {"path": "/x"}},
        {"name": "dshm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}},
    ]


def test_two_mounts_never_share_a_path():
    ours = {"volumeMounts": [{"name": "dshm", "mountPath": "/dev/shm"}]}
    users = {"volumeMounts": [{"name": "mine", "mountPath": "/dev/shm"}]}
    assert overlay(ours, users)["volumeMounts"] == [{"name": "mine", "mountPath": "/dev/shm"}]


def test_a_probe_has_one_handler():
    ours = {"livenessProbe": {"httpGet": {"path": "/healthz"}, "periodSeconds": 10}}
    users = {"livenessProbe": {"exec": {"command": ["true"]}}}
    assert overlay(ours, users)["livenessProbe"] == {"exec": {"command": ["true"]}, "periodSeconds": 10}


def test_tolerations_are_added_once():
    spot = {"key": "spot", "operator": "Exists"}
    assert overlay({"tolerations": [{"key": "gpu"}]}, {"tolerations": [spot]})["tolerations"] == [{"key": "gpu"}, spot]
    assert overlay({"tolerations": [spot]}, {"tolerations": [spot]})["tolerations"] == [spot]


def test_any_other_list_is_replaced():
    assert overlay({"args": ["trainer"]}, {"args": ["x", "y"]}) == {"args": ["x", "y"]}


@given(JSON, JSON)
def test_nothing_a_user_writes_raises_or_leaves_a_null_or_alters_its_arguments(base, change):
    before = copy.deepcopy((base, change))
    merged = overlay(overlay(None, base), change)
    assert merged is None or not nulls(merged)
    assert (base, change) == before


@given(JSON)
def test_laying_a_template_over_itself_changes_nothing(value):
    once = overlay(None, value)
    assert overlay(once, once) == once
