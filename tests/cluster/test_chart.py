"""The chart on a real cluster: lint, refusals, install and test, uninstall, scope, rights, upgrade, two replicas."""

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.jobs import smallest
from support.kube_cluster import ClusterError, KubeCluster, until
from support.tba_stack import OPERATOR_IMAGE, OPERATOR_NAMESPACE, ROOT, Stack, condition

from tba_operator.rbac import RULES, Place

CHART = ROOT / "charts/tba-operator"
CRD = "tbajobs.tba.dev"
PROBE = "docker.io/tba/probe:test"
NAME = "tba-operator"
"""Of what the release `tba` makes."""


@dataclass(frozen=True)
class Release:
    """A release `tba` of the chart in one namespace."""

    cluster: KubeCluster
    namespace: str

    def install(self, chart: Path = CHART, **values: Any) -> None:
        """helm upgrade --install --wait; dots of names are written `__`."""
        settings = {"image__repository": OPERATOR_IMAGE, "image__tag": "test", **values}
        options = [x for k, v in settings.items() for x in ("--set-json", f"{k.replace('__', '.')}={json.dumps(v)}")]
        self.helm("upgrade", "--install", "tba", str(chart), "--wait", "--timeout", "120s", *options)

    def helm(self, *args: str) -> str:
        """helm in this namespace."""
        return self.cluster.helm("-n", self.namespace, *args)

    def kubectl(self, *args: str, **options: Any) -> str:
        """kubectl in this namespace."""
        return self.cluster.kubectl("-n", self.namespace, *args, **options)

    @property
    def account(self) -> str:
        """The operator, to impersonate."""
        return f"system:serviceaccount:{self.namespace}:{NAME}"

    def pods(self) -> dict[str, dict[str, Any]]:
        """The operator's pods by name, those that go aside."""
        found = self.cluster.get("-n", self.namespace, "pods", "-l", "app.kubernetes.io/name=tba-operator")["items"]
        return {p["metadata"]["name"]: p for p in found if "deletionTimestamp" not in p["metadata"]}

    def leader(self) -> str | None:
        """The pod that holds the Lease."""
        holder = self.cluster.get("-n", self.namespace, "lease", NAME)["spec"].get("holderIdentity") or ""
        return holder.rpartition("_")[0] or None


@pytest.fixture(scope="module")
def alone(cluster) -> Iterator[KubeCluster]:
    """The cluster without the stack of other modules; it is put back as it was."""
    stacked = OPERATOR_NAMESPACE in cluster.helm("list", "-A", "-f", "^tba$")
    if stacked:
        cluster.helm("uninstall", "tba", "-n", OPERATOR_NAMESPACE, "--wait")
    cluster.kubectl("delete", "crd", CRD, "--ignore-not-found", "--timeout=60s")
    yield cluster
    if stacked:
        Stack(cluster).install()


@pytest.fixture
def swept(alone) -> Iterator[KubeCluster]:
    """Afterwards nothing of the chart is left that has no namespace."""
    yield alone
    alone.kubectl("delete", "crd", CRD, "--ignore-not-found", "--timeout=60s")
    alone.kubectl("delete", "clusterroles,clusterrolebindings", "-l", "app.kubernetes.io/part-of=tba")


@pytest.fixture
def release(swept, namespace) -> Release:
    """Not installed yet. It goes with its namespace, after what a failure leaves there was saved."""
    return Release(swept, namespace)


# -- without an install


def render(helm, *options: str, release: str = "tba", namespace: str = "ops") -> list[dict[str, Any]]:
    return [d for d in yaml.safe_load_all(helm("template", release, str(CHART), "-n", namespace, *options)) if d]


def only(documents: list[dict[str, Any]], kind: str, name: str = "") -> dict[str, Any]:
    found = [d for d in documents if d["kind"] == kind and d["metadata"]["name"].startswith(name)]
    assert len(found) == 1, [d["metadata"]["name"] for d in found]
    return found[0]


EVERYTHING = {
    "image": {"digest": "sha256:" + "a" * 64, "pullPolicy": "Always"},
    "imagePullSecrets": ["one", "2"],
    "workloads": {"imagePullSecrets": ["x", "y"], "networkPolicy": {"metricsNamespaceLabels": {"a": "b", "c": "d"}}},
    "replicas": 3,
    "podAnnotations": {"note": "1"},
    "podLabels": {"team": "ml", "app.kubernetes.io/name": "mine"},
    "nodeSelector": {"disk": "ssd"},
    "tolerations": [{"key": "x", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
    "priorityClassName": "high",
    "extraEnv": [{"name": "SSL_CERT_FILE", "value": "/x"}],
    "serviceAccount": {"annotations": {"a": "b"}},
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "dashboard": {"enabled": True},
    "global": {"anything": 1},
}
SETS = {
    "defaults": {},
    "everything": EVERYTHING,
    "namespaced": {"watch": {"namespaces": ["a", "b"]}, **EVERYTHING},
    "nothing": {
        "crds": {"install": False},
        "rbac": {"create": False},
        "serviceAccount": {"create": False, "name": "mine"},
        "networkPolicy": {"enabled": False},
        "workloads": {"networkPolicy": {"enabled": False}},
    },
}


@pytest.mark.parametrize("values", SETS.values(), ids=SETS)
def test_lint_is_clean(helm, tmp_path, values):
    (tmp_path / "values.yaml").write_text(json.dumps(values))
    told = helm("lint", "--strict", str(CHART), "-f", str(tmp_path / "values.yaml"))
    assert "WARNING" not in told and "1 chart(s) linted, 0 chart(s) failed" in told


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ("replica=2", "'replica' not allowed"),
        ("image.tga=1", "'tga' not allowed"),
        ("workers=many", "/workers"),
        ("watch.namespaces=research", "/watch/namespaces"),
        ("watch.namespaces={Research}", "/watch/namespaces/0"),
        ("image.digest=latest", "/image/digest"),
        ("extraEnv[0].name=TBA_WORKERS", "/extraEnv/0/name"),
    ],
)
def test_a_wrong_value_is_refused_by_its_name(helm, wrong, told):
    with pytest.raises(ClusterError) as refused:
        render(helm, "--set", wrong)
    assert told in str(refused.value)


def test_the_chart_renders_the_crd_as_it_was_generated(helm):
    crd = only(render(helm), "CustomResourceDefinition")
    assert crd["metadata"].pop("annotations") == {"helm.sh/resource-policy": "keep"}
    assert crd == yaml.safe_load((ROOT / f"crds/{CRD}.yaml").read_text())


def test_values_arrive_where_they_belong(helm, tmp_path):
    (tmp_path / "values.yaml").write_text(json.dumps(EVERYTHING))
    documents = render(helm, "-f", str(tmp_path / "values.yaml"))
    template = only(documents, "Deployment")["spec"]["template"]
    pod, (container,) = template["spec"], template["spec"]["containers"]
    env = {e["name"]: e.get("value") for e in container["env"]}
    assert container["image"].endswith("/tba-operator@sha256:" + "a" * 64)
    assert pod["imagePullSecrets"] == [{"name": "one"}, {"name": "2"}]
    assert env["TBA_IMAGE_PULL_SECRETS"] == "x,y"
    assert env["TBA_METRICS_NAMESPACE_LABELS"] == "a=b,c=d"
    assert env["SSL_CERT_FILE"] == "/x"
    assert template["metadata"]["labels"]["team"] == "ml"
    assert template["metadata"]["labels"]["app.kubernetes.io/name"] == "tba-operator"
    assert pod["affinity"] == {"nodeAffinity": {}} and "topologySpreadConstraints" not in pod
    assert only(documents, "PodDisruptionBudget")["spec"]["maxUnavailable"] == 1
    assert only(documents, "PodMonitor")["metadata"]["labels"]["release"] == "prometheus"
    test_pod = only(documents, "Pod")["spec"]
    assert test_pod["imagePullSecrets"] == pod["imagePullSecrets"] and test_pod["tolerations"] == pod["tolerations"]


def test_what_is_switched_off_is_not_made(helm, tmp_path):
    (tmp_path / "values.yaml").write_text(json.dumps(SETS["nothing"]))
    documents = render(helm, "-f", str(tmp_path / "values.yaml"))
    assert {d["kind"] for d in documents} == {"Deployment", "Service", "Pod"}
    assert only(documents, "Deployment")["spec"]["template"]["spec"]["serviceAccountName"] == "mine"


def test_releases_in_two_namespaces_share_no_object(helm):
    def names(namespace):
        options = ("--set", "watch.namespaces={x}", "--set", "crds.install=false")
        documents = render(helm, *options, namespace=namespace)
        # The roles of the watched namespace, which two operators must not share, aside.
        return {(d["kind"], d["metadata"].get("namespace"), d["metadata"]["name"]) for d in documents} - {
            (kind, "x", NAME) for kind in ("Role", "RoleBinding")
        }

    assert not names("one") & names("two")


@pytest.mark.parametrize(
    ("release", "name"), [("tba", NAME), (NAME, NAME), ("prod", "prod-tba-operator"), ("r" * 53, None), ("1", None)]
)
def test_names_fit_whatever_the_release_is_called(helm, release, name):
    for document in render(helm, "--set", "dashboard.enabled=true", release=release):
        metadata = document["metadata"]
        assert len(metadata["name"]) <= 63
        assert all(isinstance(v, str) and len(v) <= 63 for v in metadata.get("labels", {}).values())
        if document["kind"] == "Deployment" and name:
            assert metadata["name"] == name


# -- installed


def suspended(**metadata: Any) -> dict[str, Any]:
    """A job without pods."""
    job = smallest(suspend=True)
    return job | {"metadata": job["metadata"] | metadata}


def observed(cluster: KubeCluster, namespace: str, name: str = "gsm8k") -> bool:
    """Whether an operator has looked at the newest generation of a job."""
    job = cluster.get("-n", namespace, "tbajob", name)
    return job.get("status", {}).get("observedGeneration") == job["metadata"]["generation"]


def test_install_and_test_then_uninstall_keeps_definition_and_jobs(release):
    # The namespace enforces restricted Pod Security: the test pod, too, has to meet it.
    release.install()
    told = release.helm("test", "tba", "--logs", "--timeout", "90s")
    assert "Phase:          Succeeded" in told, told
    assert "/readyz leading" in told
    assert not release.kubectl("get", "pods", "-l", "app.kubernetes.io/name=tba-operator-test", "-o", "name")

    release.cluster.apply(suspended(), namespace=release.namespace)
    until("the job is looked at", lambda: observed(release.cluster, release.namespace))
    job = release.cluster.get("-n", release.namespace, "tbajob", "gsm8k")
    assert condition(job, "Suspended")["status"] == "True"

    release.helm("uninstall", "tba", "--wait")
    until("the operator is gone", lambda: not release.pods(), seconds=60)
    kept = release.cluster.get("-n", release.namespace, "tbajob", "gsm8k")
    assert kept["metadata"]["uid"] == job["metadata"]["uid"] and kept["status"] == job["status"]

    release.install()  # the definition that was kept is taken up again
    release.kubectl("annotate", "tbajob", "gsm8k", "again=true")
    release.kubectl("patch", "tbajob", "gsm8k", "--type=merge", "-p", '{"spec": {"runPolicy": {"backoffLimit": 9}}}')
    until("the job is looked at again", lambda: observed(release.cluster, release.namespace))


def test_a_standing_definition_of_another_release_is_told(release, second_namespace):
    release.install()
    other = Release(release.cluster, second_namespace)
    with pytest.raises(ClusterError, match=r"tbajobs.tba.dev.*invalid ownership metadata"):
        other.install(watch__namespaces=[second_namespace])
    release.cluster.helm("uninstall", "tba", "-n", second_namespace, "--wait", "--ignore-not-found")
    other.install(watch__namespaces=[second_namespace], crds__install=False)
    other.helm("uninstall", "tba", "--wait")


# -- rights


def rules_of(cluster: KubeCluster, user: str, namespace: str) -> set[tuple[str, str, str]]:
    """(group, resource, verb) that a user has in a namespace, objects without one included."""
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectRulesReview",
        "spec": {"namespace": namespace},
    }
    # Not validated: kubectl would ask for the definitions as that user.
    options = ("--validate=false", "-o", "json", f"--as={user}")
    told = cluster.kubectl("create", "-f", "-", *options, input=json.dumps(review))
    rules = json.loads(told)["status"]["resourceRules"]
    return {(g, r, v) for rule in rules for g in rule["apiGroups"] for r in rule["resources"] for v in rule["verbs"]}


def own_rules_of(release: Release, namespace: str) -> set[tuple[str, str, str]]:
    """The operator's, without what every ServiceAccount has."""
    anybody = f"system:serviceaccount:{release.namespace}:nobody"
    return rules_of(release.cluster, release.account, namespace) - rules_of(release.cluster, anybody, namespace)


def table(*places: Place) -> set[tuple[str, str, str]]:
    """What the operator's table says of these places."""
    return {
        (rule.group, resource, verb)
        for rule in RULES
        for resource in rule.resources
        for verb in rule.verbs
        if rule.place in places
    }


def may(cluster: KubeCluster, user: str, *asked: str) -> bool:
    """kubectl auth can-i."""
    told = cluster.kubectl("auth", "can-i", *asked, f"--as={user}", check=False)
    assert told.splitlines()[-1] in ("yes", "no"), told
    return told.splitlines()[-1] == "yes"


@pytest.fixture
def bound(release) -> Release:
    """Installed without a pod: rights are all that matters."""
    release.install(replicas=0)
    return release


def test_the_operator_may_what_its_table_says_everywhere_and_no_more(bound, second_namespace):
    assert own_rules_of(bound, second_namespace) == table("namespaced", "cluster")
    assert own_rules_of(bound, bound.namespace) == table("namespaced", "cluster", "lease")
    forbidden = (("get", "secrets"), ("create", "pods", "--subresource=exec"), ("get", "pods", "--subresource=proxy"))
    for asked in (*forbidden, ("create", "tbajobs.tba.dev"), ("patch", "tbajobs.tba.dev")):
        assert not may(bound.cluster, bound.account, *asked, "-n", second_namespace), asked


def test_with_namespaces_the_operator_has_rights_only_there(release, second_namespace):
    release.install(replicas=0, watch__namespaces=[second_namespace])
    assert own_rules_of(release, second_namespace) == table("namespaced", "cluster")
    assert own_rules_of(release, release.namespace) == table("lease", "cluster")
    assert own_rules_of(release, "default") == table("cluster")
    assert may(release.cluster, release.account, "list", "tbajobs.tba.dev", "-n", second_namespace)
    assert not may(release.cluster, release.account, "list", "tbajobs.tba.dev", "-A")
    release.install(replicas=0, watch__namespaces=[second_namespace], rbac__clusterRoles=False)
    assert own_rules_of(release, second_namespace) == table("namespaced")


def test_all_namespaces_without_cluster_roles_is_refused(helm):
    with pytest.raises(ClusterError, match=r"rbac.clusterRoles=false needs watch.namespaces"):
        render(helm, "--set", "rbac.clusterRoles=false")


def test_editors_and_viewers_of_a_namespace_may_edit_and_view_its_jobs(bound, second_namespace):
    for role in ("edit", "view"):
        binding = ("create", "rolebinding", role, f"--clusterrole={role}", f"--user={role}or")
        bound.cluster.kubectl("-n", second_namespace, *binding)
    here = ("-n", second_namespace)
    until("aggregation", lambda: may(bound.cluster, "editor", "create", "tbajobs.tba.dev", *here), seconds=20)
    assert may(bound.cluster, "editor", "get", "tbajobs.tba.dev", *here)
    assert may(bound.cluster, "editor", "patch", "tbajobs.tba.dev", "--subresource=scale", *here)
    assert may(bound.cluster, "viewor", "list", "tbajobs.tba.dev", *here)
    assert not may(bound.cluster, "viewor", "patch", "tbajobs.tba.dev", *here)
    assert not may(bound.cluster, "editor", "patch", "tbajobs.tba.dev", "--subresource=status", *here)
    assert not may(bound.cluster, "editor", "create", "tbajobs.tba.dev", "-n", "default")


def test_with_namespaces_and_without_cluster_roles_it_works_there_and_leaves_jobs_elsewhere_alone(
    release, second_namespace
):
    release.install(watch__namespaces=[second_namespace], rbac__clusterRoles=False)
    for place in (release.namespace, second_namespace):
        release.cluster.apply(suspended(), namespace=place)
    until("the job is looked at", lambda: observed(release.cluster, second_namespace))
    assert "status" not in release.cluster.get("-n", release.namespace, "tbajob", "gsm8k")
    assert not [line for line in release.kubectl("logs", f"deployment/{NAME}").splitlines() if "orbidden" in line]


# -- upgrade


@pytest.fixture
def older(tmp_path, helm) -> Path:
    """The package of a version before this one, whose definition lacks `runPolicy.ttlSecondsAfterFinished`."""
    chart = tmp_path / "tba-operator"
    shutil.copytree(CHART, chart)
    about = (chart / "Chart.yaml").read_text()
    (chart / "Chart.yaml").write_text(re.sub(r"(?m)^(version|appVersion): .*", r"\1: 0.0.1", about))
    crd = yaml.safe_load((chart / "files/crd.yaml").read_text())
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    del schema["properties"]["spec"]["properties"]["runPolicy"]["properties"]["ttlSecondsAfterFinished"]
    (chart / "files/crd.yaml").write_text(yaml.safe_dump(crd))
    helm("package", str(chart), "-d", str(tmp_path))
    return tmp_path / "tba-operator-0.0.1.tgz"


def running(name: str, **run_policy: Any) -> dict[str, Any]:
    """A job whose pods answer every probe and need no storage. The searchers' image is the operator's default."""
    pod = {"command": ["/probe"], "args": ["serve", "8080"], "terminationGracePeriodSeconds": 5}
    searcher = pod | {"replicas": 2, "engine": {"type": "transformers"}}
    job = smallest(trainer=pod | {"image": PROBE}, searcher=searcher, runPolicy=run_policy)
    return job | {"metadata": {"name": name}}


def identities(cluster: KubeCluster, namespace: str) -> dict[str, Any]:
    """What a rolled pod would change, and what the StatefulSet controller decides it from."""
    sets = cluster.get("-n", namespace, "statefulsets")["items"]
    jobs = cluster.get("-n", namespace, "jobs")["items"]
    return {
        "revisions": {s["metadata"]["name"]: s["status"]["updateRevision"] for s in sets},
        "jobs": {j["metadata"]["name"]: j["metadata"]["uid"] for j in jobs},
        "pods": workload_pods(cluster, namespace),
    }


def workload_pods(cluster: KubeCluster, namespace: str) -> dict[str, str]:
    """Name -> uid of the pods of jobs."""
    pods = cluster.get("-n", namespace, "pods", "-l", "tba.dev/role")["items"]
    return {p["metadata"]["name"]: p["metadata"]["uid"] for p in pods}


@pytest.mark.timeout(400)
def test_an_upgrade_brings_new_fields_and_rolls_no_pod(release, older, second_namespace):
    cluster = release.cluster
    release.install(older, workloads__searcherImage=PROBE)
    job = running("gsm8k", ttlSecondsAfterFinished=100)
    cluster.kubectl("-n", second_namespace, "apply", "--validate=false", "-f", "-", input=json.dumps(job))
    stored = cluster.get("-n", second_namespace, "tbajob", "gsm8k")
    assert "ttlSecondsAfterFinished" not in stored["spec"].get("runPolicy", {}), "the older definition prunes it"
    ready = ("wait", "--for=condition=Ready", "--timeout=90s", "pod", "-l", "tba.dev/job-name=gsm8k")
    until("three pods", lambda: len(workload_pods(cluster, second_namespace)) == 3, seconds=60)
    cluster.kubectl("-n", second_namespace, *ready)
    before = identities(cluster, second_namespace)

    older_pods = release.pods().keys()
    release.install(workloads__searcherImage="example.org/searcher:2")
    until("the new operator leads", lambda: release.leader() in release.pods().keys() - older_pods)
    cluster.kubectl("-n", second_namespace, "apply", "-f", "-", input=json.dumps(job))
    until("the new operator looks at the job", lambda: observed(cluster, second_namespace), seconds=60)
    stored = cluster.get("-n", second_namespace, "tbajob", "gsm8k")
    assert stored["spec"]["runPolicy"]["ttlSecondsAfterFinished"] == 100
    assert stored["status"]["images"] == {"searcher": PROBE}, "it keeps what it began with"
    assert identities(cluster, second_namespace) == before


# -- two replicas


def test_of_two_replicas_one_leads_and_the_other_takes_over(release):
    release.install(replicas=2)
    first = until("a leader", release.leader)
    assert first in release.pods() and len(release.pods()) == 2
    release.cluster.apply(suspended(), namespace=release.namespace)
    until("the job is looked at", lambda: observed(release.cluster, release.namespace))

    release.kubectl("delete", "pod", first, "--wait=false")
    second = until("a successor of one that goes", lambda: successor(release, first), seconds=20)
    assert second in release.pods()
    release.cluster.apply(suspended(name="after-a-goodbye"), namespace=release.namespace)
    until("a job is looked at", lambda: observed(release.cluster, release.namespace, "after-a-goodbye"), seconds=20)

    until("two pods again", lambda: len(release.pods()) == 2)
    kill(release.cluster, release.pods()[second])
    until("a successor of one that died", lambda: successor(release, second), seconds=25)
    release.cluster.apply(suspended(name="after-a-death"), namespace=release.namespace)
    until("a job is looked at", lambda: observed(release.cluster, release.namespace, "after-a-death"), seconds=20)


def successor(release: Release, leader: str | None) -> str | None:
    holder = release.leader()
    return holder if holder != leader else None


def kill(cluster: KubeCluster, pod: dict[str, Any]) -> None:
    """SIGKILL to its container, from the node: nothing can be handed over."""
    container = pod["status"]["containerStatuses"][0]["containerID"].rpartition("/")[2]
    cluster.node("exec", pod["spec"]["nodeName"], "crictl", "stop", "--timeout", "0", container)
