"""The real Kueue controller as a process beside a cluster, its webhooks registered by address."""

import base64
import json
import os
import signal
import socket
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from support.kube_cluster import ClusterError, until

from tba.cli.local_run import free_port

SERVED = ("batch", "apps", "kueue.x-k8s.io")
"""API groups whose webhooks are registered: of the others there is no kind in the cluster."""

_START = """
set -e
layer=$1; shift
mkdir -p "$layer/upper/kueue/metrics/certs" "$layer/work"
cp "$layer/tls.crt" "$layer/tls.key" "$layer/upper/kueue/metrics/certs/"
mount -t overlay overlay -o "lowerdir=/etc,upperdir=$layer/upper,workdir=$layer/work" /etc
exec "$@"
"""
"""Kueue without its own certificate management reads /etc/kueue/metrics/certs: only its process sees that folder."""


@dataclass
class Kueue:
    """One controller. `kubectl(*arguments, input=text)` gives what kubectl prints and raises if it fails."""

    kubectl: Callable[..., str]
    kubeconfig: Path
    programs: Path
    folder: Path
    process: subprocess.Popen[bytes] | None = None
    port: int = field(default_factory=free_port)
    """Of the webhooks."""

    def start(self, *, external_frameworks: tuple[str, ...] = ("TBAJob.v1alpha1.tba.dev",)) -> None:
        """Install the kinds, run the controller, register its webhooks; returns when it serves.

        Raises:
            ClusterError: it is not built, or ended, or does not come up within a minute; with the end of its log.
        """
        if not (self.programs / "kueue").exists():
            raise ClusterError("Kueue is not built: tests/cluster/companions/kueue/build.sh")
        for path in self._kinds():
            self.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(path))
        for kind in self._names():
            until(f"{kind} are served", lambda kind=kind: self.kubectl("get", kind, "-A", "-o", "json"))
        self._make_certificate()
        config = self.folder / "config.yaml"
        config.write_text(yaml.safe_dump(self._config(external_frameworks)))
        command = [
            self.programs / "kueue",
            f"--config={config}",
            f"--kubeconfig={self.kubeconfig}",
            "--zap-log-level=2",
        ]
        with (self.folder / "kueue.log").open("wb") as log:
            self.process = subprocess.Popen(
                ["unshare", "--mount", "bash", "-c", _START, "bash", self.folder, *command],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "KUBECONFIG": str(self.kubeconfig)},
            )
        self._wait()
        self.kubectl("apply", "-f", "-", input=json.dumps({"apiVersion": "v1", "kind": "List", "items": self._hooks()}))

    def stop(self) -> None:
        """End the controller and take its webhooks away: left alone, they would refuse every Job of the cluster."""
        if self.process is None:
            return
        for hook in self._hooks():
            self.kubectl("delete", hook["kind"], hook["metadata"]["name"], "--ignore-not-found")
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def uninstall(self) -> None:
        """Remove the kinds, and with them every object of theirs, also those that await a controller that is gone."""
        for kind in self._names():
            for held in json.loads(self.kubectl("get", kind, "-A", "-o", "json"))["items"]:
                place = ["-n", held["metadata"]["namespace"]] if "namespace" in held["metadata"] else []
                release = '{"metadata":{"finalizers":null}}'
                self.kubectl(*place, "patch", kind, held["metadata"]["name"], "--type=merge", "-p", release)
        self.kubectl("delete", "crd", "--ignore-not-found", "--timeout=60s", *self._names())

    def log(self) -> str:
        """What it has said."""
        return (self.folder / "kueue.log").read_text()

    def _kinds(self) -> list[Path]:
        return sorted((self.programs / "kueue-config").glob("kueue.x-k8s.io_*.yaml"))

    def _names(self) -> list[str]:
        return [f"{path.stem.removeprefix('kueue.x-k8s.io_')}.kueue.x-k8s.io" for path in self._kinds()]

    def _config(self, external_frameworks: tuple[str, ...]) -> dict[str, Any]:
        return {
            "apiVersion": "config.kueue.x-k8s.io/v1beta2",
            "kind": "Configuration",
            "namespace": "kueue-system",
            "health": {"healthProbeBindAddress": "0"},
            "metrics": {"bindAddress": "0"},
            "webhook": {"host": "127.0.0.1", "port": self.port, "certDir": str(self.folder)},
            "leaderElection": {"leaderElect": False},
            "internalCertManagement": {"enable": False},
            "featureGates": {"VisibilityOnDemand": False},
            "integrations": {
                "frameworks": ["batch/job", "pod", "statefulset"],
                "externalFrameworks": list(external_frameworks),
            },
        }

    def _make_certificate(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=kueue"
        files = ["-keyout", str(self.folder / "tls.key"), "-out", str(self.folder / "tls.crt")]
        names = ["-addext", "subjectAltName=IP:127.0.0.1"]
        subprocess.run([*command.split(), *files, *names], check=True, capture_output=True)

    def _hooks(self) -> list[dict[str, Any]]:
        authority = base64.b64encode((self.folder / "tls.crt").read_bytes()).decode()
        found = []
        for registration in yaml.safe_load_all((self.programs / "kueue-config/webhooks.yaml").read_text()):
            hooks = [hook for hook in registration["webhooks"] if set(hook["rules"][0]["apiGroups"]) <= set(SERVED)]
            for hook in hooks:
                path = hook["clientConfig"]["service"]["path"]
                hook["clientConfig"] = {"url": f"https://127.0.0.1:{self.port}{path}", "caBundle": authority}
            name = f"kueue-test-{registration['kind'].split('Webhook')[0].lower()}"
            found.append(registration | {"metadata": {"name": name}, "webhooks": hooks})
        return found

    def _wait(self) -> None:
        assert self.process is not None
        process = self.process
        until("Kueue serves", lambda: process.poll() is not None or _is_served(self.port))
        if process.poll() is not None:
            raise ClusterError(f"Kueue ended with {process.returncode}:\n{self.log()[-3000:]}")


def _is_served(port: int) -> bool:
    with socket.socket() as client:
        client.settimeout(1.0)
        return client.connect_ex(("127.0.0.1", port)) == 0
