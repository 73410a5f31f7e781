"""The real cluster, for the tests of this folder. They fail, never skip, where it cannot run."""

import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from support.kube_cluster import SCRIPTS, ClusterError, KubeCluster, only_session
from support.tba_stack import Stack

PREPARED = "tba-examples"
FAILURES = SCRIPTS / ".failures" / KubeCluster().run.name
_failed = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """Remember a failure for the ends of the fixtures, of whichever scope."""
    report = yield
    if report.failed:
        for node in item.listchain():
            node.stash[_failed] = True
    return report


@pytest.fixture(scope="session")
def cluster(request) -> Iterator[KubeCluster]:
    """The cluster that `make cluster-up` started, or one for this session.

    TBA_KEEP_CLUSTER=1 leaves it up, TBA_CONTROL_PLANE_ONLY=1 starts no nodes.
    Its kubectl and helm are the first on PATH; no other variable is set.
    """
    cluster = KubeCluster()
    with ExitStack() as ends:
        patch = ends.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("PATH", f"{cluster.bin}:{os.environ['PATH']}")
        started, reason = False, ""
        try:
            ends.enter_context(only_session(cluster.run))
            shutil.rmtree(FAILURES, ignore_errors=True)
            started = start(cluster)
        except ClusterError as error:
            reason = str(error)
        if reason:
            pytest.fail(f"no cluster: {reason}", pytrace=False)
        yield cluster
        if started and os.environ.get("TBA_KEEP_CLUSTER") != "1":
            if request.session.testsfailed:
                keep_logs(cluster)
            cluster.down()


def start(cluster: KubeCluster) -> bool:
    """Whether it was this session that started it; a cluster that is up has the images of its start."""
    if cluster.is_up():
        golden = Path(os.environ.get("KUBE_GOLDEN", SCRIPTS / ".golden")) / "archives"
        for node in (cluster.run / "nodes").glob("*"):
            seeded = node / "var/lib/containerd/archives"
            if golden.exists() and (not seeded.exists() or seeded.read_text() != golden.read_text()):
                raise ClusterError("the running cluster has older images than .golden: make cluster-down cluster-up")
        return False
    cluster.down()
    try:
        cluster.up(0 if os.environ.get("TBA_CONTROL_PLANE_ONLY") == "1" else 2)
    except ClusterError:
        keep_logs(cluster)
        cluster.down()
        raise
    return True


def keep_logs(cluster: KubeCluster) -> None:
    """Where `pytest_terminal_summary` tells to look."""
    if (cluster.run / "logs").exists():
        shutil.copytree(cluster.run / "logs", FAILURES / "cluster", dirs_exist_ok=True)


@pytest.fixture(scope="session")
def kubeconfig(cluster) -> Path:
    """The administrator's."""
    return cluster.kubeconfig


@pytest.fixture(scope="session")
def kubectl(cluster) -> Callable[..., str]:
    """`KubeCluster.kubectl`."""
    return cluster.kubectl


@pytest.fixture(scope="session")
def helm(cluster) -> Callable[..., str]:
    """`KubeCluster.helm`."""
    return cluster.helm


@pytest.fixture
def namespace(request, cluster) -> Iterator[str]:
    """A fresh namespace that admits restricted pods only; gone when the test has ended."""
    with fresh_namespace(request, cluster) as name:
        yield name


@pytest.fixture
def second_namespace(request, cluster) -> Iterator[str]:
    """Another one."""
    with fresh_namespace(request, cluster) as name:
        yield name


@pytest.fixture(scope="module")
def shared_namespace(request, cluster) -> Iterator[str]:
    """One for all tests of a module that do not get in each other's way: its end alone takes five seconds."""
    with fresh_namespace(request, cluster) as name:
        yield name


@pytest.fixture(scope="session")
def storage(cluster) -> Iterator[Stack]:
    """MinIO in the cluster, by hack/minio.yaml; what it holds lasts for the session."""
    stack = Stack(cluster)
    stack.install_storage()
    yield stack
    stack.remove_storage()


@pytest.fixture(scope="session")
def base(storage) -> None:
    """examples/arithmetic, prepared in the bucket by a Job of the workload image."""
    storage.cluster.kubectl("create", "namespace", PREPARED)
    try:
        storage.prepare(PREPARED)
    finally:
        storage.cluster.kubectl("delete", "namespace", PREPARED, "--wait=false")


@pytest.fixture(scope="module")
def stack(storage) -> Iterator[Stack]:
    """The operator by Helm, and storage."""
    storage.install()
    yield storage
    storage.uninstall()


@contextmanager
def fresh_namespace(request: pytest.FixtureRequest, cluster: KubeCluster) -> Iterator[str]:
    """Named after the test or its module; what a failure leaves in it is saved first."""
    stem = re.sub(r"[^a-z0-9]+", "-", Path(request.node.name).stem.lower().removeprefix("test_"))[:40].strip("-")
    name = f"{stem}-{secrets.token_hex(2)}"
    labels = {"pod-security.kubernetes.io/enforce": "restricted", "tba.dev/test": "true"}
    cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}})
    yield name
    if request.node.stash.get(_failed, False):
        cluster.save_namespace(name, FAILURES / name)
    # First the jobs: a namespace waits for half the longest grace period that its pods were given.
    cluster.kubectl("-n", name, "delete", "tbajobs", "--all", "--cascade=foreground", "--timeout=60s", check=False)
    cluster.kubectl("delete", "namespace", name, "--wait", "--timeout=90s", "--ignore-not-found")


def pytest_terminal_summary(terminalreporter) -> None:
    """Say where the failures' logs are."""
    if FAILURES.exists():
        terminalreporter.write_line(f"what the failed tests left: {FAILURES}")
