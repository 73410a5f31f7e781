"""What the controller relies on of an API server, as sentences: run against a real one and against the fake."""

from collections.abc import Awaitable, Callable
from itertools import pairwise

import pytest

from tba_operator.kubeapi import Conflict, Invalid, KubeApi, NotFound, Object
from tba_operator.world import Ref

Sentence = Callable[[KubeApi, str], Awaitable[None]]
"""(api, a namespace of its own)"""


CUSTOM = "contract.tba.dev/v1"
"""Group and version of a custom resource of kind TBAJob whose schema takes anything: tests/cluster makes it."""


def config_map(namespace: str, **data: str) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "run-config", "namespace": namespace, "labels": {"tba.dev/job-name": "run"}},
        "data": data,
    }


def stateful_set(namespace: str, *, replicas: int | None = 1, image: str = "a:1", **spec: object) -> Object:
    labels = {"tba.dev/job-name": "run"}
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {"name": "run-searcher", "namespace": namespace, "labels": labels},
        "spec": {
            "serviceName": "run-searcher",
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels},
                "spec": {"containers": [{"name": "searcher", "image": image, "env": [{"name": "A", "value": "1"}]}]},
            },
        }
        | ({} if replicas is None else {"replicas": replicas})
        | spec,
    }


def pod(namespace: str) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "run-trainer-1-0", "namespace": namespace},
        "spec": {"containers": [{"name": "trainer", "image": "a:1"}], "automountServiceAccountToken": False},
    }


def ref(found: Object) -> Ref:
    return Ref(found["apiVersion"], found["kind"], found["metadata"]["namespace"], found["metadata"]["name"])


def version(found: Object) -> str:
    return found["metadata"]["resourceVersion"]


def conditions(found: Object) -> dict[str, str]:
    return {condition["type"]: condition["status"] for condition in found["status"].get("conditions", [])}


def with_conditions(namespace: str, **statuses: str) -> Object:
    moment = "2026-01-01T00:00:00Z"
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {"name": "run-searcher", "namespace": namespace},
        "status": {
            "replicas": 1,
            "conditions": [
                {"type": kind, "status": status, "reason": "Test", "lastTransitionTime": moment}
                for kind, status in statuses.items()
            ],
        },
    }


async def absent_object_is_none(api: KubeApi, namespace: str) -> None:
    assert await api.get(Ref("v1", "ConfigMap", namespace, "absent")) is None


async def absent_kind_is_none_to_get_and_not_found_to_the_rest(api: KubeApi, namespace: str) -> None:
    assert not await api.has_kind("kueue.x-k8s.io/v1beta2", "Workload")
    assert await api.has_kind("apps/v1", "StatefulSet")
    assert await api.get(Ref("kueue.x-k8s.io/v1beta2", "Workload", namespace, "run")) is None
    with pytest.raises(NotFound):
        await api.list("kueue.x-k8s.io/v1beta2", "Workload", namespace)
    with pytest.raises(NotFound):
        await api.apply(
            {
                "apiVersion": "kueue.x-k8s.io/v1beta2",
                "kind": "Workload",
                "metadata": {"name": "run", "namespace": namespace},
                "spec": {},
            }
        )


async def apply_creates_then_updates_then_changes_nothing(api: KubeApi, namespace: str) -> None:
    created = await api.apply(config_map(namespace, a="1", b="2"))
    assert created["metadata"]["uid"] and "managedFields" not in created["metadata"]
    changed = await api.apply(config_map(namespace, a="1", b="3"))
    assert changed["data"] == {"a": "1", "b": "3"} and version(changed) != version(created)
    assert changed["metadata"]["uid"] == created["metadata"]["uid"]
    assert version(await api.apply(config_map(namespace, a="1", b="3"))) == version(changed)


async def what_is_applied_no_more_is_removed(api: KubeApi, namespace: str) -> None:
    await api.apply(config_map(namespace, a="1", b="2"))
    assert (await api.apply(config_map(namespace, b="2")))["data"] == {"b": "2"}


async def generation_counts_changes_of_the_spec_alone(api: KubeApi, namespace: str) -> None:
    first = await api.apply(stateful_set(namespace))
    assert first["metadata"]["generation"] == 1
    labelled = stateful_set(namespace)
    labelled["metadata"]["annotations"] = {"note": "x"}
    assert (await api.apply(labelled))["metadata"]["generation"] == 1
    await api.apply_status(with_conditions(namespace, Known="True"))
    found = await api.apply(stateful_set(namespace, image="a:2"))
    assert found["metadata"]["generation"] == 2
    assert "generation" not in (await api.apply(config_map(namespace)))["metadata"]


async def spec_and_status_are_written_apart(api: KubeApi, namespace: str) -> None:
    await api.apply(stateful_set(namespace) | {"status": {"replicas": 7}})
    created = await api.get(ref(stateful_set(namespace))) or {}
    assert created.get("status", {}).get("replicas", 0) != 7  # a real controller may have counted its pod by now
    written = await api.apply_status(with_conditions(namespace, Known="True") | {"spec": {"replicas": 9}})
    assert written["status"]["replicas"] == 1 and written["spec"]["replicas"] == 1


async def conditions_of_a_status_are_replaced_by_type(api: KubeApi, namespace: str) -> None:
    await api.apply(stateful_set(namespace))
    await api.apply_status(with_conditions(namespace, One="True", Two="False"))
    written = await api.apply_status(with_conditions(namespace, Two="True", Three="False"))
    assert conditions(written) == {"Two": "True", "Three": "False"}
    again = [await api.apply_status(with_conditions(namespace, Two="True", Three="False")) for _ in range(5)]
    # Not each time: a real controller of StatefulSets writes this status too, once or twice.
    assert any(version(one) == version(other) for one, other in pairwise(again))


async def status_of_an_absent_object_is_not_found(api: KubeApi, namespace: str) -> None:
    with pytest.raises(NotFound):
        await api.apply_status(with_conditions(namespace, Known="True"))


async def a_uid_in_a_write_is_a_condition(api: KubeApi, namespace: str) -> None:
    created = await api.apply(stateful_set(namespace))
    namesake = stateful_set(namespace)
    namesake["metadata"]["uid"] = "00000000-0000-0000-0000-000000000000"
    with pytest.raises(Conflict):
        await api.apply(namesake)
    other = stateful_set(namespace)
    other["metadata"] |= {"name": "other", "uid": created["metadata"]["uid"]}
    with pytest.raises(Conflict):
        await api.apply(other)


async def a_status_is_written_to_the_version_it_was_made_from_and_no_namesake(api: KubeApi, namespace: str) -> None:
    job: Object = {
        "apiVersion": CUSTOM,
        "kind": "TBAJob",
        "metadata": {"name": "run", "namespace": namespace},
        "spec": {"suspend": True},
    }
    first = await api.create(job)
    assert first["metadata"]["generation"] == 1
    await api.delete(ref(first), uid=first["metadata"]["uid"])
    second = await api.create(job)

    def status(seen: Object, phase: str = "Running") -> Object:
        metadata = {name: seen["metadata"][name] for name in ("name", "namespace", "uid", "resourceVersion")}
        return {"apiVersion": CUSTOM, "kind": "TBAJob", "metadata": metadata, "status": {"phase": phase}}

    with pytest.raises(Conflict):
        await api.apply_status(status(first))
    assert "status" not in (await api.get(ref(second)) or {})
    written = await api.apply_status(status(second))
    assert written["status"] == {"phase": "Running"} and written["metadata"]["generation"] == 1
    with pytest.raises(Conflict):
        await api.apply_status(status(second, "Failed"))
    again = await api.apply_status(status(written))
    assert version(again) == version(written)
    await api.delete(ref(second), uid=second["metadata"]["uid"])
    with pytest.raises(NotFound):
        await api.apply_status(status(written))


async def dry_run_changes_nothing(api: KubeApi, namespace: str) -> None:
    await api.create(pod(namespace), dry_run=True)
    assert await api.get(ref(pod(namespace))) is None


async def a_name_is_created_once(api: KubeApi, namespace: str) -> None:
    await api.create(config_map(namespace))
    with pytest.raises(Conflict):
        await api.create(config_map(namespace))


async def replace_needs_the_newest_version(api: KubeApi, namespace: str) -> None:
    with pytest.raises(NotFound):
        await api.replace(config_map(namespace, a="0"))
    first = await api.create(config_map(namespace, a="1"))
    second = await api.replace(first | {"data": {"a": "2"}})
    assert second["data"] == {"a": "2"}
    with pytest.raises(Conflict):
        await api.replace(first | {"data": {"a": "3"}})


async def scale_writes_replicas_and_apply_takes_them_back(api: KubeApi, namespace: str) -> None:
    found = await api.apply(stateful_set(namespace, replicas=1))
    await api.scale(ref(found), 4)
    scaled = await api.get(ref(found)) or {}
    assert scaled["spec"]["replicas"] == 4 and scaled["metadata"]["generation"] == 2
    without = await api.apply(stateful_set(namespace, replicas=None))
    assert without["spec"]["replicas"] == 4
    assert (await api.apply(stateful_set(namespace, replicas=2)))["spec"]["replicas"] == 2
    with pytest.raises(NotFound):
        await api.scale(Ref("apps/v1", "StatefulSet", namespace, "absent"), 1)


async def delete_spares_a_namesake(api: KubeApi, namespace: str) -> None:
    created = await api.apply(config_map(namespace))
    await api.delete(ref(created), uid="00000000-0000-0000-0000-000000000000")
    assert await api.get(ref(created)) is not None
    await api.delete(ref(created), uid=created["metadata"]["uid"])
    assert await api.get(ref(created)) is None
    await api.delete(ref(created), uid=created["metadata"]["uid"])


async def a_finalizer_holds_a_deleted_object(api: KubeApi, namespace: str) -> None:
    manifest = config_map(namespace)
    manifest["metadata"]["finalizers"] = ["tba.dev/test"]
    created = await api.apply(manifest)
    await api.delete(ref(created), uid=created["metadata"]["uid"])
    held = await api.get(ref(created)) or {}
    assert "deletionTimestamp" in held["metadata"]
    await api.apply(config_map(namespace))  # the finalizer is applied no more
    assert await api.get(ref(created)) is None


async def a_pod_of_no_node_is_deleted_at_once(api: KubeApi, namespace: str) -> None:
    manifest = pod(namespace)
    manifest["spec"]["schedulerName"] = "nobody"
    created = await api.create(manifest)
    await api.delete(ref(created), uid=created["metadata"]["uid"], grace_seconds=30)
    assert await api.get(ref(created)) is None


async def a_pod_on_a_node_ends_with_its_grace(api: KubeApi, namespace: str) -> None:
    manifest = pod(namespace)
    manifest["spec"] |= {"nodeName": "nowhere", "terminationGracePeriodSeconds": 90}
    created = await api.create(manifest)
    await api.delete(ref(created), uid=created["metadata"]["uid"])
    going = await api.get(ref(created)) or {}
    assert going["metadata"]["deletionGracePeriodSeconds"] == 90
    await api.delete(ref(created), uid=created["metadata"]["uid"], grace_seconds=0)
    assert await api.get(ref(created)) is None


async def lists_are_selected_by_labels_and_fields(api: KubeApi, namespace: str) -> None:
    for name, labels in (("a", {"job": "x", "role": "t"}), ("b", {"job": "x"}), ("c", {"job": "y"})):
        manifest = config_map(namespace)
        manifest["metadata"] |= {"name": name, "labels": labels}
        await api.apply(manifest)

    async def names(labels: str | None = None, fields: str | None = None) -> list[str]:
        found = await api.list("v1", "ConfigMap", namespace, label_selector=labels, field_selector=fields)
        assert all(item["kind"] == "ConfigMap" and item["apiVersion"] == "v1" for item in found)
        return [item["metadata"]["name"] for item in found if item["metadata"]["name"] != "kube-root-ca.crt"]

    assert await names() == ["a", "b", "c"]
    assert await names("job=x") == ["a", "b"]
    assert await names("job=x,role=t") == ["a"]
    assert await names("job,!role,job!=y") == ["b"]
    assert await names(fields="metadata.name=c") == ["c"]
    everywhere = await api.list("v1", "ConfigMap", label_selector="job=y")
    assert [item["metadata"]["namespace"] for item in everywhere if item["metadata"]["namespace"] == namespace]


async def what_is_immutable_is_refused(api: KubeApi, namespace: str) -> None:
    await api.apply(stateful_set(namespace))
    with pytest.raises(Invalid, match="serviceName|updates to statefulset spec"):
        await api.apply(stateful_set(namespace, serviceName="other"))


async def an_event_is_told_once(api: KubeApi, namespace: str) -> None:
    created = await api.apply(config_map(namespace))
    for _ in range(3):
        await api.emit_event(created, "Warning", "QuotaExceeded", "no room: " + "ü" * 2000)
    found = await api.list("events.k8s.io/v1", "Event", namespace)
    assert [(e["type"], e["reason"], e["regarding"]["uid"]) for e in found] == [
        ("Warning", "QuotaExceeded", created["metadata"]["uid"])
    ]


async def an_event_that_is_refused_does_no_harm(api: KubeApi, namespace: str) -> None:
    absent = config_map("no-such-namespace-here")
    absent["metadata"]["uid"] = "u"
    await api.emit_event(absent, "Normal", "Nothing", "into the void")


SENTENCES: tuple[Sentence, ...] = (
    absent_object_is_none,
    absent_kind_is_none_to_get_and_not_found_to_the_rest,
    apply_creates_then_updates_then_changes_nothing,
    what_is_applied_no_more_is_removed,
    generation_counts_changes_of_the_spec_alone,
    spec_and_status_are_written_apart,
    conditions_of_a_status_are_replaced_by_type,
    status_of_an_absent_object_is_not_found,
    a_uid_in_a_write_is_a_condition,
    a_status_is_written_to_the_version_it_was_made_from_and_no_namesake,
    dry_run_changes_nothing,
    a_name_is_created_once,
    replace_needs_the_newest_version,
    scale_writes_replicas_and_apply_takes_them_back,
    delete_spares_a_namesake,
    a_finalizer_holds_a_deleted_object,
    a_pod_of_no_node_is_deleted_at_once,
    a_pod_on_a_node_ends_with_its_grace,
    lists_are_selected_by_labels_and_fields,
    what_is_immutable_is_refused,
    an_event_is_told_once,
    an_event_that_is_refused_does_no_harm,
)
