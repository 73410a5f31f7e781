"""Faults of a real cluster, each undone by its counterpart or by the cluster's own restart loops."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

from support.kube_cluster import KubeCluster, until


def kill_kubelet(cluster: KubeCluster, node: str) -> None:
    """SIGKILL; its restart loop starts it again within a second or two."""
    cluster.node("signal", node, "kubelet", "KILL")


def kill_containerd(cluster: KubeCluster, node: str) -> None:
    """SIGKILL; started again as the kubelet is. The containers run on."""
    cluster.node("signal", node, "containerd", "KILL")


def cut_power(cluster: KubeCluster, node: str) -> None:
    """Every process of the node is gone at once; its disk stays. Take the last node: services are reached by node 1."""
    cluster.node("kill", node)


def start_node(cluster: KubeCluster, node: str) -> None:
    """Boot it again; `wait_ready` waits until the API server knows."""
    cluster.node("start", node)


def is_ready(cluster: KubeCluster, node: str) -> bool:
    """What the API server says of the node."""
    conditions = cluster.get("node", node)["status"]["conditions"]
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


def wait_ready(cluster: KubeCluster, node: str, *, ready: bool = True, seconds: float = 60.0) -> None:
    """Wait until the API server says so."""
    until(f"{node} ready={ready}", lambda: is_ready(cluster, node) is ready, seconds=seconds)


def drain(cluster: KubeCluster, node: str) -> None:
    """Cordon it and evict its pods, respecting disruption budgets."""
    cluster.kubectl("drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=90s")


def uncordon(cluster: KubeCluster, node: str) -> None:
    """Let it have pods again."""
    cluster.kubectl("uncordon", node)


def restart_apiserver(cluster: KubeCluster) -> None:
    """SIGKILL and start again, its clients on the host too; returns when it answers and all nodes are Ready."""
    os.kill(_apiserver(cluster), signal.SIGKILL)
    cluster.up()


@contextmanager
def frozen_apiserver(cluster: KubeCluster) -> Iterator[None]:
    """Connections stay open and nothing answers: the worst kind of outage for a client."""
    process = _apiserver(cluster)
    os.kill(process, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process, signal.SIGCONT)


def stop_apiserver(cluster: KubeCluster, seconds: float) -> None:
    """Freeze it for so long, then wait until it answers."""
    with frozen_apiserver(cluster):
        time.sleep(seconds)
    until("the API server answers", cluster.is_up)


def _apiserver(cluster: KubeCluster) -> int:
    return int((cluster.run / "pids/apiserver").read_text().split()[0])
