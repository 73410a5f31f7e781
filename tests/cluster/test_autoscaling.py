"""Searchers are scaled by Kubernetes' own autoscaler, or by the controller, and spec says who."""

import pytest
import yaml
from support.cluster_run import ClusterRun
from support.kube_cluster import until
from support.tba_stack import ROOT

SCALER = ROOT / "examples/autoscaling/hpa.yaml"


@pytest.fixture(scope="module")
def run(stack, base, shared_namespace) -> ClusterRun:
    """One searcher, in the middle of training."""
    stack.secret(shared_namespace)
    running = ClusterRun(stack, shared_namespace)
    requests = {"resources": {"requests": {"cpu": "5m"}}}
    running.apply(searcher={**requests, "replicas": 1, "autoscaling": {"mode": "External"}})
    running.reaches(5)
    return running


def desired(run: ClusterRun) -> int:
    return run.job["status"]["searcher"]["desiredReplicas"]


def test_an_hpa_scales_the_searchers_through_the_scale_subresource(run):
    """The example's, with a metric that needs no Prometheus."""
    manifest = yaml.safe_load(SCALER.read_text())
    target = {"type": "Utilization", "averageUtilization": 50}
    manifest["spec"]["scaleTargetRef"]["name"] = run.name
    manifest["spec"] |= {
        "maxReplicas": 2,
        "metrics": [{"type": "Resource", "resource": {"name": "cpu", "target": target}}],
    }
    del manifest["spec"]["behavior"]
    run.stack.cluster.apply(manifest, namespace=run.namespace)
    until("the HPA asks for two", lambda: run.job["spec"]["searcher"]["replicas"] == 2, seconds=120)
    until("two ready searchers", lambda: len(run.ready_pods("searcher")) == 2, seconds=120)
    assert desired(run) == 2
    run.kubectl("delete", "-f", str(SCALER))


def test_managed_keeps_the_bounds_and_leaves_spec_as_it_was_written(run):
    run.patch(searcher={"replicas": 2, "autoscaling": {"mode": "Managed", "maxReplicas": 1}})
    until("one desired", lambda: desired(run) == 1, seconds=30)
    until("one searcher", lambda: len(run.pods("searcher")) == 1, seconds=120)
    assert run.job["spec"]["searcher"]["replicas"] == 2
