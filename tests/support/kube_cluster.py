"""The real cluster of tests/cluster as Python calls: its scripts, kubectl and helm."""

import hashlib
import json
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

SCRIPTS = Path(__file__).parents[1] / "cluster"
T = TypeVar("T")


class ClusterError(Exception):
    """The cluster, or a command against it, failed; says why."""


def until(what: str, probe: Callable[[], T], *, seconds: float = 60.0) -> T:
    """Ask `probe` until its answer is true, and return that answer.

    A failed command counts as no answer: the API server may be away for a moment.

    Raises:
        ClusterError: after `seconds`, with the last answer.
    """
    start = time.monotonic()
    while True:
        try:
            last: object = probe()
            if last:
                return last  # pyright: ignore[reportReturnType]
        except ClusterError as error:
            last = error
        waited = time.monotonic() - start
        if waited > seconds:
            raise ClusterError(f"{what}: not within {seconds:g} s; last: {last}")
        time.sleep(min(0.2 + waited / 30, 1.0))  # a probe is mostly a kubectl, which takes what is waited for


@dataclass(frozen=True)
class KubeCluster:
    """One cluster in its run folder. Changes nothing of this process's environment."""

    run: Path = field(default_factory=lambda: Path(os.environ.get("KUBE_RUN", SCRIPTS / ".run")).absolute())
    bin: Path = field(default_factory=lambda: Path(os.environ.get("KUBE_BIN", SCRIPTS / ".bin")).absolute())

    @property
    def kubeconfig(self) -> Path:
        """The administrator's."""
        return self.run / "admin.conf"

    @property
    def env(self) -> dict[str, str]:
        """An environment in which `kubectl` and `helm` reach the cluster."""
        own = {"KUBECONFIG": str(self.kubeconfig), "KUBE_RUN": str(self.run), "KUBE_BIN": str(self.bin)}
        return {**os.environ, **own, "PATH": f"{self.bin}:{os.environ['PATH']}", "HELM_CACHE_HOME": f"{self.run}/helm"}

    def up(self, nodes: int | None = None) -> None:
        """Start what does not run; `nodes`: as many as before, or two.

        Raises:
            ClusterError: with the script's reason and the ends of the logs.
        """
        count = {} if nodes is None else {"KUBE_NODES": str(nodes)}
        try:
            self._call([str(SCRIPTS / "up.sh")], timeout=240, env=count)
        except ClusterError as error:
            raise ClusterError(f"{error}\n{self.log_ends()}") from None

    def down(self, *, keep_logs: bool = False) -> None:
        """End it and remove everything, but for the logs if told so."""
        self._call([str(SCRIPTS / "down.sh"), *(["--keep-logs"] if keep_logs else [])], timeout=120)

    def is_up(self) -> bool:
        """Whether the API server answers."""
        try:
            return self.kubeconfig.exists() and self.kubectl("get", "--raw", "/readyz", timeout=10) == "ok"
        except ClusterError:
            return False

    def kubectl(self, *args: str, input: str = "", check: bool = True, timeout: float = 120.0) -> str:  # noqa: A002
        """What kubectl prints; with `check=False` its errors as well, whatever its exit status.

        Raises:
            ClusterError: exit status other than 0, with what it said on stderr.
        """
        return self._call([str(self.bin / "kubectl"), *args], text=input, check=check, timeout=timeout)

    def helm(self, *args: str, input: str = "", check: bool = True, timeout: float = 180.0) -> str:  # noqa: A002
        """As `kubectl`."""
        return self._call([str(self.bin / "helm"), *args], text=input, check=check, timeout=timeout)

    def node(self, verb: str, node: str, *args: str, timeout: float = 60.0) -> str:
        """node.sh with a node's name, whatever KUBE_NODE it begins with: start, kill, exec, signal."""
        number = node[len(node.rstrip("0123456789")) :]
        return self._call([str(SCRIPTS / "node.sh"), verb, number, *args], timeout=timeout)

    def get(self, *args: str) -> Any:
        """`kubectl get ARGS -o json`, parsed."""
        return json.loads(self.kubectl("get", *args, "-o", "json"))

    def apply(self, *manifests: dict[str, Any], namespace: str | None = None) -> None:
        """Apply manifests, all at once."""
        document = json.dumps({"apiVersion": "v1", "kind": "List", "items": manifests})
        self.kubectl(*(["-n", namespace] if namespace else []), "apply", "-f", "-", input=document)

    def save_namespace(self, namespace: str, folder: Path) -> None:
        """Write what a person needs to see why a test failed: objects, events and the logs of every container."""
        folder.mkdir(parents=True, exist_ok=True)
        in_namespace = ("-n", namespace)
        views = {
            "events.txt": ["get", "events", "--sort-by=.lastTimestamp"],
            "pods.txt": ["describe", "pods"],
            "objects.txt": ["get", "all,configmaps,pvc,networkpolicies,pdb", "-o", "wide"],
            "objects.yaml": ["get", "all,configmaps", "-o", "yaml"],
            "custom.yaml": ["get", "tbajobs", "-o", "yaml"],
        }
        for name, command in views.items():
            (folder / name).write_text(self.kubectl(*in_namespace, *command, check=False, timeout=30))
        for pod in self.kubectl(*in_namespace, "get", "pods", "-o", "name", check=False, timeout=30).split():
            logs = ["logs", pod, "--all-containers", "--prefix", "--timestamps", "--tail=5000"]
            for name, options in {"log": [], "previous.log": ["--previous"]}.items():
                text = self.kubectl(*in_namespace, *logs, *options, check=False, timeout=30)
                (folder / f"{pod.removeprefix('pod/')}.{name}").write_text(text)

    def log_ends(self, lines: int = 8) -> str:
        """The last lines of each log of the cluster's own programs."""
        logs = sorted((self.run / "logs").glob("*.log"))
        return "\n".join(f"== {log}\n" + "\n".join(log.read_text().splitlines()[-lines:]) for log in logs)

    def _call(
        self,
        command: list[str],
        *,
        text: str = "",
        check: bool = True,
        timeout: float,
        env: dict[str, str] | None = None,
    ) -> str:
        shown = " ".join([Path(command[0]).name, *command[1:]])
        try:
            result = subprocess.run(
                command,
                input=text,
                capture_output=True,
                text=True,
                timeout=timeout,
                env={**self.env, **(env or {})},
            )
        except subprocess.TimeoutExpired as error:
            raise ClusterError(f"{shown}: no end within {timeout:g} s") from error
        except FileNotFoundError as error:
            raise ClusterError(f"{command[0]} is missing: make cluster-build") from error
        if not check:
            return result.stdout + result.stderr
        if result.returncode:
            raise ClusterError(f"{shown}: exit status {result.returncode}: {(result.stderr or result.stdout).strip()}")
        return result.stdout


@contextmanager
def only_session(run: Path) -> Iterator[None]:
    """One test session at a time on the cluster of a run folder: fault tests of one would fail those of another.

    An abstract socket is the lock: the kernel lets go of it with the process, and no file stays.
    """
    with socket.socket(socket.AF_UNIX) as lock:
        try:
            lock.bind(f"\0test-cluster-{hashlib.sha256(bytes(run.resolve())).hexdigest()}")
        except OSError:
            raise ClusterError("another test session uses the cluster: wait until it has ended") from None
        yield
