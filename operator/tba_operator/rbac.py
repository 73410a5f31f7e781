"""What the controller may do in a cluster: one table. The chart's roles are made from it (hack/rbac.py).

Deliberately missing: secrets (pods mount them, the controller never reads them), pods/exec, pods/proxy, any write of a
TBAJob's spec, and creating TBAJobs.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from tba_operator.api import GROUP, PLURAL

Place = Literal["namespaced", "cluster", "lease"]
"""Where a rule is granted: in each watched namespace (all: by a ClusterRole); in the whole cluster, since the objects
have no namespace; in the operator's own namespace."""
KUEUE = "kueue.x-k8s.io"
APPLIED = ("get", "list", "watch", "create", "patch")
"""A child: watched, looked up before its name is taken, server-side applied."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One line of the table."""

    why: str
    group: str
    """Empty for the core group."""
    resources: tuple[str, ...]
    verbs: tuple[str, ...]
    place: Place = "namespaced"


RULES = (
    Rule("the jobs; one whose time to live is over is deleted", GROUP, (PLURAL,), ("get", "list", "watch", "delete")),
    Rule("their status", GROUP, (f"{PLURAL}/status",), ("patch",)),
    Rule(
        "owner references that block deletion, where the cluster checks them",
        GROUP,
        (f"{PLURAL}/finalizers",),
        ("update",),
    ),
    Rule("run.json and live.json, DNS names, identities", "", ("configmaps", "services", "serviceaccounts"), APPLIED),
    Rule("who may talk to the pods", "networking.k8s.io", ("networkpolicies",), (*APPLIED, "delete")),
    Rule("how many searchers a drain may take", "policy", ("poddisruptionbudgets",), (*APPLIED, "delete")),
    Rule("trainer attempts", "batch", ("jobs",), (*APPLIED, "delete")),
    Rule("searchers", "apps", ("statefulsets",), (*APPLIED, "delete")),
    Rule("another number of searchers with the same template", "apps", ("statefulsets/scale",), ("patch",)),
    Rule(
        "create: dry-run of a pod template, to tell its errors; delete: a searcher whose node is lost",
        "",
        ("pods",),
        ("list", "watch", "create", "delete"),
    ),
    Rule("why a pod could not be created or started", "", ("events",), ("list",)),
    Rule("what the controller has to say about a job", "events.k8s.io", ("events",), ("create",)),
    Rule("quota from Kueue", KUEUE, ("workloads",), (*APPLIED, "delete")),
    Rule("quota back to Kueue, pods ready, the end", KUEUE, ("workloads/status",), ("update",)),
    Rule("whether the node of a pod that does not end is lost", "", ("nodes",), ("get",), "cluster"),
    Rule("labels and tolerations of the flavor that Kueue chose", KUEUE, ("resourceflavors",), ("get",), "cluster"),
    Rule("the priority of a queued job", KUEUE, ("workloadpriorityclasses",), ("get",), "cluster"),
    Rule("the priority of a queued job", "scheduling.k8s.io", ("priorityclasses",), ("get",), "cluster"),
    Rule("which replica leads", "coordination.k8s.io", ("leases",), ("get", "create", "update"), "lease"),
)


def rules(place: Place) -> list[dict[str, Any]]:
    """`rules` of a Role or ClusterRole."""
    return [
        {"apiGroups": [rule.group], "resources": list(rule.resources), "verbs": list(rule.verbs)}
        for rule in RULES
        if rule.place == place
    ]


def granted() -> frozenset[tuple[str, str, str]]:
    """(group, resource, verb) of everything that is granted anywhere."""
    return frozenset(_triples())


def _triples() -> Iterator[tuple[str, str, str]]:
    for rule in RULES:
        for resource in rule.resources:
            for verb in rule.verbs:
                yield rule.group, resource, verb
