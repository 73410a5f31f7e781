"""The cluster is a real one: what an operator and its fault tests rely on holds."""

import pytest
from support.cluster_faults import (
    cut_power,
    drain,
    kill_containerd,
    kill_kubelet,
    restart_apiserver,
    start_node,
    stop_apiserver,
    uncordon,
    wait_ready,
)
from support.kube_cluster import ClusterError, until
from support.probe_pods import job, pod_spec, service, workload


def pods(cluster, namespace: str) -> list[dict]:
    return cluster.get("pods", "-n", namespace)["items"]


def on_node(cluster, namespace: str, node: str) -> list[str]:
    found = pods(cluster, namespace)
    return [pod["metadata"]["uid"] for pod in found if pod["spec"].get("nodeName") == node]


def spread(cluster, namespace: str) -> None:
    """A Deployment with a pod on each node."""
    constraint = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": {"app": "web"}},
    }
    web = workload("Deployment", "web", 2)
    web["spec"]["template"]["spec"]["topologySpreadConstraints"] = [constraint]
    cluster.apply(web, namespace=namespace)
    cluster.kubectl("-n", namespace, "wait", "--for=condition=Available", "deployment/web", "--timeout=60s")


def test_pods_find_services_and_each_other_by_name(cluster, namespace):
    cluster.apply(
        workload("Deployment", "web", 2),
        service("web"),
        workload("StatefulSet", "db", 2, serviceName="db"),
        service("db", clusterIP="None"),
        namespace=namespace,
    )
    cluster.kubectl("-n", namespace, "wait", "--for=condition=Available", "deployment/web", "--timeout=60s")
    cluster.kubectl("-n", namespace, "rollout", "status", "statefulset/db", "--timeout=60s")
    names = ("web", f"web.{namespace}.svc.cluster.local", "db-0.db", f"db-1.db.{namespace}.svc.cluster.local")
    cluster.apply(job("client", "get", *(f"http://{name}:8080/" for name in names)), namespace=namespace)
    cluster.kubectl("-n", namespace, "wait", "--for=condition=Complete", "job/client", "--timeout=60s")
    answers = [line.split()[1:] for line in cluster.kubectl("-n", namespace, "logs", "job/client").splitlines()]
    assert answers[2:] == [["200", "db-0"], ["200", "db-1"]]
    assert all(name.startswith("web-") for _, name in answers[:2])


def test_a_service_account_may_what_its_role_says_and_no_more(cluster, shared_namespace):
    role = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "Role",
        "metadata": {"name": "reader"},
        "rules": [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}],
    }
    binding = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": {"name": "reader"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "reader"},
        "subjects": [{"kind": "ServiceAccount", "name": "reader", "namespace": shared_namespace}],
    }
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "reader"}}
    cluster.apply(account, role, binding, namespace=shared_namespace)
    api = f"https://kubernetes.default.svc/api/v1/namespaces/{shared_namespace}"
    cluster.apply(
        job("client", "get", "-token", f"{api}/pods", f"{api}/secrets", serviceAccountName="reader"),
        namespace=shared_namespace,
    )
    cluster.kubectl("-n", shared_namespace, "wait", "--for=condition=Complete", "job/client", "--timeout=60s")
    answers = cluster.kubectl("-n", shared_namespace, "logs", "job/client").splitlines()
    assert [line.split()[1] for line in answers] == ["200", "403"]


def test_restricted_namespaces_refuse_other_pods(cluster, shared_namespace):
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "loose"}, "spec": pod_spec("sleep")}
    pod["spec"]["containers"][0]["securityContext"] = {"runAsNonRoot": True}
    with pytest.raises(ClusterError, match="violates PodSecurity"):
        cluster.apply(pod, namespace=shared_namespace)


def test_a_pod_over_its_memory_limit_is_killed(cluster, shared_namespace):
    greedy = job("greedy", "eat")
    greedy["spec"]["template"]["spec"]["containers"][0]["resources"] = {"limits": {"memory": "32Mi"}}
    cluster.apply(greedy, namespace=shared_namespace)

    def ends() -> list[dict]:
        found = cluster.get("pods", "-n", shared_namespace, "-l", "job-name=greedy")["items"]
        statuses = [status for pod in found for status in pod["status"].get("containerStatuses", [])]
        return [status["state"]["terminated"] for status in statuses if "terminated" in status["state"]]

    [end] = until("the container's end", ends)
    assert (end["reason"], end["exitCode"]) == ("OOMKilled", 137)


def test_pods_outlive_a_kill_of_kubelet_and_containerd(cluster, namespace):
    spread(cluster, namespace)
    before = on_node(cluster, namespace, "node2")
    kill_kubelet(cluster, "node2")
    kill_containerd(cluster, "node2")
    # A pod that starts there afterwards shows that both are back.
    cluster.apply(job("after", "get", nodeName="node2"), namespace=namespace)
    cluster.kubectl("-n", namespace, "wait", "--for=condition=Complete", "job/after", "--timeout=60s")
    assert set(before) <= set(on_node(cluster, namespace, "node2"))
    assert all(pod["status"]["containerStatuses"][0]["restartCount"] == 0 for pod in pods(cluster, namespace))


def test_a_node_that_lost_power_loses_its_pods_and_comes_back(cluster, namespace):
    spread(cluster, namespace)
    lost = on_node(cluster, namespace, "node2")
    assert lost
    cut_power(cluster, "node2")
    try:
        wait_ready(cluster, "node2", ready=False, seconds=40)
        until("the lost pod's replacement", lambda: len(on_node(cluster, namespace, "node1")) == 2, seconds=60)
    finally:
        start_node(cluster, "node2")
    wait_ready(cluster, "node2", seconds=60)
    until("the lost pod is gone", lambda: not set(lost) & set(on_node(cluster, namespace, "node2")), seconds=60)


def test_a_drained_node_gives_up_its_pods_and_takes_new_ones_afterwards(cluster, namespace):
    spread(cluster, namespace)
    drain(cluster, "node2")
    try:
        assert on_node(cluster, namespace, "node2") == []
    finally:
        uncordon(cluster, "node2")
    cluster.apply(job("after", "get", nodeName="node2"), namespace=namespace)
    cluster.kubectl("-n", namespace, "wait", "--for=condition=Complete", "job/after", "--timeout=60s")


def test_state_survives_kill_and_freeze_of_the_api_server(cluster, namespace):
    cluster.kubectl("-n", namespace, "create", "configmap", "kept", "--from-literal=a=b")
    restart_apiserver(cluster)
    assert cluster.get("configmap", "kept", "-n", namespace)["data"] == {"a": "b"}
    stop_apiserver(cluster, 3)
    cluster.apply(job("after", "get"), namespace=namespace)
    cluster.kubectl("-n", namespace, "wait", "--for=condition=Complete", "job/after", "--timeout=60s")


def test_helm_installs_and_removes_a_chart(cluster, helm, shared_namespace, tmp_path):
    helm("create", str(tmp_path / "trial"))
    helm(
        "install",
        "trial",
        str(tmp_path / "trial"),
        "-n",
        shared_namespace,
        "--set",
        "replicaCount=0",
        "--wait",
        "--timeout=60s",
    )
    assert cluster.get("deployments", "-n", shared_namespace)["items"]
    helm("uninstall", "trial", "-n", shared_namespace, "--wait")
    assert not cluster.get("deployments", "-n", shared_namespace)["items"]


def test_nodes_serve_metrics(cluster):
    assert "node2" in until("metrics", lambda: cluster.kubectl("top", "node"), seconds=60)
