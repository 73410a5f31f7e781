"""The project on the test cluster: operator by Helm, S3 by hack/minio.yaml, jobs by kubectl. What a user would do."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from support.kube_cluster import KubeCluster, until

from tba.store import ObjectStore, open_store

ROOT = Path(__file__).parents[2]
OPERATOR_NAMESPACE = "tba-system"
OPERATOR_IMAGE = "docker.io/tba/operator"
WORKLOAD_IMAGE = "docker.io/tba/workload:test"
MINIO_IMAGE = "docker.io/minio/minio:test"
KEYS = {"AWS_ACCESS_KEY_ID": "minioadmin", "AWS_SECRET_ACCESS_KEY": "minioadmin"}
VALUES = {
    "image.repository": OPERATOR_IMAGE,
    "image.tag": "test",
    "workloads.trainerImage": WORKLOAD_IMAGE,
    "workloads.searcherImage": WORKLOAD_IMAGE,
    "progressSeconds": "2",
}


@dataclass(frozen=True)
class Stack:
    """Operator and storage, installed."""

    cluster: KubeCluster

    def install(self, **values: str) -> None:
        """helm upgrade --install, and wait until the operator is ready; dots of names are written `__`."""
        settings = VALUES | {name.replace("__", "."): value for name, value in values.items()}
        options = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
        self.cluster.helm(
            *("upgrade", "--install", "tba", str(ROOT / "charts/tba-operator"), "-n", OPERATOR_NAMESPACE),
            *("--create-namespace", "--wait", "--timeout", "120s", *options),
        )

    def restart(self) -> None:
        """Another operator process: what it looks for at its start may have come or gone."""
        place = ("-n", OPERATOR_NAMESPACE, "rollout")
        deployment = ("deployment", "-l", "app.kubernetes.io/name=tba-operator")
        self.cluster.kubectl(*place, "restart", *deployment)
        self.cluster.kubectl(*place, "status", *deployment, "--timeout=90s")

    def uninstall(self) -> None:
        """Operator and CRD go, and with it every job."""
        self.cluster.helm("-n", OPERATOR_NAMESPACE, "uninstall", "tba", "--wait", "--ignore-not-found")
        self.cluster.kubectl("delete", "crd", "tbajobs.tba.dev", "--ignore-not-found", "--timeout=60s")
        self.cluster.kubectl("delete", "namespace", OPERATOR_NAMESPACE, "--ignore-not-found", "--timeout=60s")

    def remove_storage(self) -> None:
        """MinIO and all that it holds."""
        self.cluster.kubectl("delete", "-f", str(ROOT / "hack/minio.yaml"), "--ignore-not-found", "--timeout=90s")

    def install_storage(self) -> None:
        """MinIO as a user has it, with the image that the tests built."""
        manifests = (ROOT / "hack/minio.yaml").read_text()
        documents = [d for d in yaml.safe_load_all(manifests) if d]
        for document in documents:
            for container in _containers(document):
                container["image"] = MINIO_IMAGE
                container["imagePullPolicy"] = "IfNotPresent"
        self.cluster.kubectl("apply", "-f", "-", input=yaml.safe_dump_all(documents))
        self.cluster.kubectl("-n", "minio", "rollout", "status", "deployment/minio", "--timeout=120s", timeout=130)

    @property
    def endpoint(self) -> str:
        """MinIO as this machine reaches it."""
        address = self.cluster.get("-n", "minio", "service", "minio")["spec"]["clusterIP"]
        return f"http://{address}:9000"

    @property
    def s3_environment(self) -> dict[str, str]:
        """For `tba` commands on this machine."""
        return {**os.environ, **KEYS, "AWS_ENDPOINT_URL_S3": self.endpoint, "AWS_REGION": "us-east-1"}

    @contextmanager
    def store(self, uri: str) -> Iterator[ObjectStore]:
        """The run's bucket prefix, from this machine."""
        before = {name: os.environ.get(name) for name in KEYS}
        os.environ.update(KEYS)
        found = open_store(uri, endpoint=self.endpoint, region="us-east-1")
        try:
            yield found
        finally:
            found.close()
            for name, value in before.items():
                os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)

    def tba(self, *args: str, timeout: float = 120.0) -> str:
        """A `tba` command on this machine against the cluster's storage."""
        result = subprocess.run(
            [sys.executable, "-m", "tba.cli", *args],
            env=self.s3_environment, capture_output=True, text=True, timeout=timeout,
        )  # fmt: skip
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    def secret(self, namespace: str, name: str = "tba-s3") -> None:
        """Storage credentials for a job."""
        secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": KEYS}
        self.cluster.apply(secret, namespace=namespace)

    def prepare(self, namespace: str) -> None:
        """kubectl apply -k examples/arithmetic: base model and data into the bucket, credentials into the namespace."""
        rendered = self.cluster.kubectl("kustomize", str(ROOT / "examples/arithmetic"))
        documents = list(yaml.safe_load_all(rendered))
        for document in documents:
            for container in _containers(document):
                container["image"] = WORKLOAD_IMAGE
        self.cluster.kubectl("-n", namespace, "apply", "-f", "-", input=yaml.safe_dump_all(documents))
        self.cluster.kubectl(
            *("-n", namespace, "wait", "job/arithmetic-prepare", "--for=condition=Complete", "--timeout=400s"),
            timeout=410,
        )

    def apply(self, namespace: str, manifest: dict[str, Any]) -> str:
        """Apply a job; what kubectl says."""
        return self.cluster.kubectl("-n", namespace, "apply", "-f", "-", input=json.dumps(manifest))

    def job(self, namespace: str, name: str) -> dict[str, Any]:
        """The TBAJob."""
        return self.cluster.get("-n", namespace, "tbajob", name)

    def pods(self, namespace: str, role: str | None = None) -> list[dict[str, Any]]:
        """Pods of jobs, of one role if it is named."""
        selector = f"tba.dev/role={role}" if role else "tba.dev/role"
        return self.cluster.get("-n", namespace, "pods", "-l", selector)["items"]

    def wait_condition(self, namespace: str, name: str, kind: str, status: str = "True", *, seconds: float) -> dict:
        """Wait for a condition of a job; fails at once if the job fails meanwhile."""

        def probe() -> dict[str, Any] | None:
            job = self.job(namespace, name)
            found = condition(job, kind)
            if kind != "Failed" and (failed := condition(job, "Failed")).get("status") == "True":
                raise AssertionError(f"{name} failed: {failed}")
            return found if found.get("status") == status else None

        return until(f"{namespace}/{name} {kind}={status}", probe, seconds=seconds)

    def wait_step(self, namespace: str, name: str, step: int, *, seconds: float) -> int:
        """Wait until the job's status tells of at least that step."""

        def probe() -> int | None:
            reached = progress(self.job(namespace, name)).get("step", 0)
            return reached if reached >= step else None

        return until(f"{namespace}/{name} at step {step}", probe, seconds=seconds)


def example(name: str = "arithmetic") -> dict[str, Any]:
    """A job file of examples/."""
    return yaml.safe_load((ROOT / f"examples/{name}.yaml").read_text())


def condition(job: dict[str, Any], kind: str) -> dict[str, Any]:
    """A condition of a job, or {}."""
    conditions = job.get("status", {}).get("conditions", [])
    return next((c for c in conditions if c["type"] == kind), {})


def progress(job: dict[str, Any]) -> dict[str, Any]:
    """status.progress of a job, or {}."""
    return job.get("status", {}).get("progress") or {}


def ready(pod: dict[str, Any]) -> bool:
    """What the pod says of itself."""
    conditions = pod.get("status", {}).get("conditions", [])
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def seconds_since(start: float) -> float:
    """Since a time.monotonic()."""
    return time.monotonic() - start


def _containers(document: dict[str, Any]) -> list[dict[str, Any]]:
    spec = document.get("spec", {}).get("template", {}).get("spec", {})
    return [*spec.get("initContainers", []), *spec.get("containers", [])]
