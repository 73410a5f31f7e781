import json

from tba_operator.caches import RECENT_SECONDS, Caches, Index, RecentWrites, trim
from tba_operator.world import Ref

KEY = ("default", "gsm8k")
REF = Ref("v1", "ConfigMap", "default", "gsm8k-config")


def config_map(version, uid="u1", **more):
    metadata = {"namespace": "default", "name": "gsm8k-config", "uid": uid, "resourceVersion": str(version), **more}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"a": "b"}}


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_managed_fields_and_the_last_applied_copy_are_dropped():
    annotations = {"kubectl.kubernetes.io/last-applied-configuration": "{}", "kept": "yes"}
    trimmed = trim(config_map(1, managedFields=[{}], annotations=annotations))
    assert "managedFields" not in trimmed["metadata"]
    assert trimmed["metadata"]["annotations"] == {"kept": "yes"}
    assert trimmed["data"] == {"a": "b"}


def test_a_pod_template_is_not_kept():
    raw = config_map(1) | {"kind": "StatefulSet", "spec": {"replicas": 3, "template": {"big": 1}}, "status": {"x": 1}}
    trimmed = trim(raw)
    assert trimmed["spec"] == {"replicas": 3}
    assert trimmed["status"] == {"x": 1}


def test_of_a_pods_spec_its_node_is_kept():
    raw = config_map(1) | {"kind": "Pod", "spec": {"nodeName": "n", "containers": [{}]}}
    assert trim(raw)["spec"] == {"nodeName": "n"}


def test_objects_share_their_strings():
    first, second = (json.loads(json.dumps(config_map(1, labels={"app": "a long-lived name"}))) for _ in range(2))
    a, b = trim(first)["metadata"]["labels"], trim(second)["metadata"]["labels"]
    assert a["app"] is b["app"]
    assert [*a][0] is [*b][0]


def test_trimming_leaves_the_object_itself_alone():
    raw = config_map(1, managedFields=[{}])
    trim(raw)
    assert "managedFields" in raw["metadata"]


def test_our_own_write_is_believed_until_the_watch_shows_it():
    recent = RecentWrites(Clock())
    recent.put(KEY, config_map(7))
    assert recent.newest(KEY, REF, None) == config_map(7)
    assert recent.newest(KEY, REF, config_map(6)) == config_map(7)
    assert recent.newest(KEY, REF, config_map(7)) == config_map(7)
    assert recent.refs(KEY) == []


def test_versions_are_compared_as_numbers():
    recent = RecentWrites(Clock())
    recent.put(KEY, config_map(10))
    assert recent.newest(KEY, REF, config_map(9)) == config_map(10)


def test_an_unconfirmed_write_is_not_believed_for_ever():
    clock = Clock()
    recent = RecentWrites(clock)
    recent.put(KEY, config_map(7))
    clock.now = RECENT_SECONDS + 0.1
    assert recent.newest(KEY, REF, None) is None


def test_objects_are_told_by_kind():
    assert Caches({}, {KEY: [config_map(1, "here")]}, {}).uids("ConfigMap") == {"here": KEY}
    assert Caches({}, {KEY: [config_map(1, "here")]}, {}).uids("Service") == {}


def test_an_index_keeps_the_newest_of_each_object():
    index = Index()
    index.put(KEY, "u", 1)
    index.put(KEY, "u", 2)
    index.put(KEY, "v", 3)
    assert list(index[KEY]) == [2, 3]


def test_an_object_is_in_one_place_only_and_leaves_nothing():
    index = Index()
    index.put(KEY, "u", 1)
    index.put(("default", "other"), "u", 1)
    assert list(index) == [("default", "other")]
    assert index.drop("u") == ("default", "other")
    assert len(index) == 0
    assert index.drop("u") is None


def test_of_a_job_and_its_namesake_the_newer_counts():
    old, new = config_map(1, "old"), config_map(2, "new")
    assert Caches({KEY: [new, old]}, {}, {}).job(KEY) == new
