"""The real cluster, for the tests of this folder. They fail, never skip, where it cannot run."""

import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from support.kube_cluster import SCRIPTS, ClusterError, KubeCluster, only_session, until
from support.tba_stack import Stack
from xdist.scheduler import LoadScopeScheduling

PREPARED = "tba-examples"
JOBS = {f"test_{name}" for name in ("autoscaling", "end_to_end", "life_cycle", "minio", "mistakes", "trainer_nodes")}
"""Modules with jobs that train: half of the time, for one worker of pytest-xdist."""
_failed = pytest.StashKey[bool]()
_ends = pytest.StashKey[bool]()


def use_own_cluster(number: int) -> None:
    """What keeps the cluster of another worker of pytest-xdist apart from the first one's."""
    os.environ |= {
        "KUBE_RUN": str(SCRIPTS / f".run-{number}"),
        "KUBE_BRIDGE": f"kube{number}",
        "KUBE_NET": f"172.29.{number}",
        "KUBE_PODS": f"10.{244 + number}",
        "KUBE_SERVICES": f"10.{96 + number}",
        "KUBE_ETCD_PORT": str(2379 + 2 * number),
    }


if number := int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")):
    use_own_cluster(number)
os.environ.setdefault("KUBE_PATIENCE", "120")  # for the other worker's up.sh
FAILURES = SCRIPTS / ".failures" / KubeCluster().run.name


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """Remember a failure for the ends of the fixtures, of whichever scope."""
    report = yield
    if report.failed:
        for node in item.listchain():
            node.stash[_failed] = True
    return report


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that share one operator come after those that install or run one of their own."""
    items.sort(key=lambda item: "stack" in getattr(item, "fixturenames", ()))
    for item in items:
        if "base" in getattr(item, "fixturenames", ()) and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(600))  # of the first one, the preparation is a part


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log) -> LoadScopeScheduling:
    """With `-n 2` each half has a cluster, and they run side by side: both wait more than they compute."""
    return Halves(config, log)


class Halves(LoadScopeScheduling):
    """The unit of work is a half. pytest-xdist's own groups do nothing with pytest 9."""

    def _split_scope(self, nodeid: str) -> str:
        return "jobs" if Path(nodeid.partition("::")[0]).stem in JOBS else "cluster"


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
        ends_here = request.config.stash[_ends] = started and os.environ.get("TBA_KEEP_CLUSTER") != "1"
        yield cluster
        if ends_here:
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
def storage(request, cluster) -> Iterator[Stack]:
    """MinIO in the cluster, by hack/minio.yaml; what it holds lasts for the session."""
    if not (cluster.bin / "minio").exists():
        pytest.fail("MinIO is not built: tests/cluster/companions/minio/build.sh", pytrace=False)
    stack = Stack(cluster)
    stack.install_storage()
    yield stack
    if not request.config.stash[_ends]:
        stack.remove_storage()


@pytest.fixture(scope="session")
def base(storage) -> None:
    """examples/arithmetic, prepared in the bucket by a Job of the workload image."""
    storage.cluster.kubectl("create", "namespace", PREPARED)
    try:
        storage.prepare(PREPARED)
    finally:
        storage.cluster.kubectl("delete", "namespace", PREPARED, "--wait=false")


@pytest.fixture(scope="session")
def stack(request, storage) -> Iterator[Stack]:
    """The operator by Helm, and storage: one install for all modules that use it, which therefore come last."""
    storage.install()
    yield storage
    if not request.config.stash[_ends]:
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
    # Pods would take the next test's processors. The rest goes meanwhile: waiting for it cost five seconds a test.
    cluster.kubectl("delete", "namespace", name, "--wait=false", "--ignore-not-found")
    until(f"no pods in {name}", lambda: not cluster.kubectl("-n", name, "get", "pods", "-o", "name"), seconds=90)


def pytest_terminal_summary(terminalreporter) -> None:
    """Say where the failures' logs are, those of other workers too."""
    if not terminalreporter.stats.keys() & {"failed", "error"}:
        return
    for folder in sorted(FAILURES.parent.glob(f"{FAILURES.name}*")):
        terminalreporter.write_line(f"what the failed tests left: {folder}")
