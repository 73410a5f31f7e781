"""Every child of a TBAJob as a manifest, a function of its arguments alone; pod templates are in pods.py.

No manifest holds a null or an empty list, nor a value that the API server would write differently: what is applied is
a subset of what comes back.
"""

import json
from collections.abc import Mapping
from typing import Any

from tba.contracts.base import Contract
from tba.contracts.runfile import LIVE_FILE, RUN_FILE, RunFile
from tba_operator import naming
from tba_operator.api import GROUP, INPUTS_ANNOTATION, KIND, VERSION, Images, Job, Role
from tba_operator.inputs import Placement, searcher_inputs, trainer_inputs, workload_identity
from tba_operator.pods import searcher_template, trainer_template
from tba_operator.world import Settings

ROLES: tuple[Role, ...] = ("trainer", "searcher")
NEVER = 2147483647
"""backoffLimit of the trainer Job: the controller counts, and only ends without a new checkpoint."""
_NAMESPACE_NAME = "kubernetes.io/metadata.name"


def all_children(
    job: Job,
    settings: Settings,
    images: Images,
) -> list[dict[str, Any]]:
    """What a running job begins with, in the order of applying; Kueue's Workload is not among them."""
    count = job.spec.searcher.replicas
    return [*furniture(job, settings, count), searcher_set(job, images, count), trainer_job(job, images, 1)]


def furniture(job: Job, settings: Settings, replicas: int) -> list[dict[str, Any]]:
    """Every child that makes no pod. `replicas`: what the StatefulSet is scaled to."""
    budget = disruption_budget(job, replicas)
    return [
        config_map(job),
        *service_accounts(job, settings),
        *services(job),
        *network_policies(job, settings),
        *([budget] if budget else []),
    ]


def config_map(job: Job) -> dict[str, Any]:
    """run.json and live.json. A live change alters live.json and at most the live fields that run.json repeats."""
    run = RunFile(owner=job.owner, name=job.name, config=job.spec.run_config())
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(job, naming.config_map(job.name)),
        "data": {RUN_FILE: _compact(run), LIVE_FILE: _compact(job.spec.live_config())},
    }


def services(job: Job) -> list[dict[str, Any]]:
    """A headless Service for each role: names for its pods, ready or not."""
    return [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": _metadata(job, naming.role_name(job.name, role), role),
            "spec": {
                "clusterIP": "None",
                "publishNotReadyAddresses": True,
                "selector": naming.selector_labels(job.name, role),
                "ports": [{"name": "http", "port": naming.HTTP_PORT, "targetPort": "http", "protocol": "TCP"}],
            },
        }
        for role in ROLES
    ]


def service_accounts(job: Job, settings: Settings | None = None) -> list[dict[str, Any]]:
    """One for each role without workload identity, with the chart's pull secrets for pods that name none."""
    pull_secrets = [{"name": name} for name in (settings.image_pull_secrets if settings else ())]
    return [
        {
            "apiVersion": "v1",
            "kind": "ServiceAccount",
            "metadata": _metadata(job, naming.role_name(job.name, role), role),
            "automountServiceAccountToken": False,
        }
        | ({"imagePullSecrets": pull_secrets} if pull_secrets else {})
        for role in ROLES
        if workload_identity(job, role) is None
    ]


def network_policies(job: Job, settings: Settings) -> list[dict[str, Any]]:
    """Nothing may connect to a role's pods but what is named here; they may connect anywhere."""
    if not settings.network_policy:
        return []
    port = [{"port": naming.HTTP_PORT, "protocol": "TCP"}]
    labels = dict(settings.metrics_namespace_labels)
    scrapers = {"namespaceSelector": {"matchLabels": labels} if labels else {}}  # {}: every namespace
    operator = {"namespaceSelector": {"matchLabels": {_NAMESPACE_NAME: settings.namespace}}}
    trainers = {"podSelector": {"matchLabels": naming.selector_labels(job.name, "trainer")}}
    return [
        _network_policy(job, "trainer", [_ingress(operator, port), _ingress(trainers), _ingress(scrapers, port)]),
        _network_policy(job, "searcher", [_ingress(scrapers, port)]),
    ]


def disruption_budget(job: Job, replicas: int | None = None) -> dict[str, Any] | None:
    """Keeps minAvailable searchers, or one less than there are: a budget without slack would block every drain for
    ever. None if nothing is left to keep; one that is there must go then.

    `replicas`: what the StatefulSet is scaled to; null: as the spec says.
    """
    searcher = job.spec.searcher
    kept = min(searcher.min_available, (searcher.replicas if replicas is None else replicas) - 1)
    if not searcher.pod_disruption_budget or kept < 1:
        return None
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": _metadata(job, naming.role_name(job.name, "searcher"), "searcher"),
        "spec": {
            "minAvailable": kept,
            "selector": {"matchLabels": naming.selector_labels(job.name, "searcher")},
            # A searcher that is not ready serves nobody: it must not hold up a drain either.
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }


def trainer_job(job: Job, images: Images, attempt: int, placement: Placement | None = None) -> dict[str, Any]:
    """One attempt: a pod a node at a time, and a new one after each end that the failure policy does not stop."""
    inputs, nodes = {INPUTS_ANNOTATION: trainer_inputs(job, images, placement)}, job.spec.trainer.nodes
    # Rank 0 decides when the run is complete; a node that misses its word must not be made again.
    success = {"successPolicy": {"rules": [{"succeededIndexes": "0"}]}} if nodes > 1 else {}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _metadata(job, naming.trainer_job(job.name, attempt), "trainer", attempt, inputs),
        "spec": {
            "completionMode": "Indexed",
            "completions": nodes,
            "parallelism": nodes,
            "backoffLimit": NEVER,
            # Not before the last pod is gone for good: two trainers would fence each other.
            "podReplacementPolicy": "Failed",
            "podFailurePolicy": {"rules": _failure_rules(job)},
            **success,
            "template": trainer_template(job, images, attempt, placement),
        },
    }


def searcher_set(job: Job, images: Images, replicas: int, placement: Placement | None = None) -> dict[str, Any]:
    """All searchers."""
    inputs = {INPUTS_ANNOTATION: searcher_inputs(job, images, placement)}
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": _metadata(job, naming.role_name(job.name, "searcher"), "searcher", None, inputs),
        "spec": {
            "replicas": replicas,
            "serviceName": naming.role_name(job.name, "searcher"),
            # OrderedReady stays stuck behind a pod that cannot start, even after its template is mended.
            "podManagementPolicy": "Parallel",
            "revisionHistoryLimit": 2,
            "selector": {"matchLabels": naming.selector_labels(job.name, "searcher")},
            "template": searcher_template(job, images, placement),
        },
    }


def rehearsal_pod(workload: Mapping[str, Any]) -> dict[str, Any]:
    """A bare pod from a Job's or StatefulSet's template, to create with dry-run: only that meets every admission."""
    metadata, template = workload["metadata"], workload["spec"]["template"]
    # The role's ServiceAccount may not exist yet.
    spec = {name: value for name, value in template["spec"].items() if name != "serviceAccountName"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            **template["metadata"],
            "name": f"{metadata['name']}-rehearse",
            "namespace": metadata["namespace"],
        },
        "spec": spec,
    }


def _metadata(
    job: Job,
    name: str,
    role: Role | None = None,
    attempt: int | None = None,
    annotations: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    owner = {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": KIND,
        "name": job.name,
        "uid": job.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }
    metadata: dict[str, Any] = {
        "name": name,
        "namespace": job.namespace,
        "labels": naming.labels(job.name, role, attempt),
    }
    if annotations:
        metadata["annotations"] = dict(annotations)
    if job.uid:  # a job file has none, and an owner that does not exist gets its children collected
        metadata["ownerReferences"] = [owner]
    return metadata


def _compact(record: Contract) -> str:
    return json.dumps(json.loads(record.to_json()), sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def _ingress(peer: Mapping[str, Any], ports: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """From `peer` to `ports`, or to all."""
    return {"from": [peer]} | ({"ports": ports} if ports else {})


def _network_policy(job: Job, role: Role, ingress: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": _metadata(job, naming.role_name(job.name, role), role),
        "spec": {
            "podSelector": {"matchLabels": naming.selector_labels(job.name, role)},
            "policyTypes": ["Ingress"],
            "ingress": ingress,
        },
    }


def _failure_rules(job: Job) -> list[dict[str, Any]]:
    """The first that fits decides; an end that fits none is counted."""
    own = [_on_exit(rule.action, rule.on_exit_codes) for rule in job.spec.run_policy.failure_rules]
    disrupted = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    fatal, fenced, outage_or_stop = [64], [3], [2, 143]
    return [
        *own,
        disrupted,
        _on_exit("FailJob", fatal),
        _on_exit("FailJob", fenced),
        _on_exit("Ignore", outage_or_stop),
    ]


def _on_exit(action: str, codes: list[int]) -> dict[str, Any]:
    """The API server wants codes ordered and once each."""
    exits = {"containerName": naming.CONTAINER["trainer"], "operator": "In", "values": sorted(set(codes))}
    return {"action": action, "onExitCodes": exits}
