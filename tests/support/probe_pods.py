"""Manifests of pods that run probe (tests/cluster/cmd/probe), for tests of the cluster itself."""

IMAGE = "tba/probe:test"
RESTRICTED = {
    "runAsNonRoot": True,
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}


def pod_spec(*args: str, **more) -> dict:
    """A pod of one container that runs probe with `args`."""
    container = {
        "name": "probe",
        "image": IMAGE,
        "imagePullPolicy": "Never",
        "args": list(args),
        "securityContext": RESTRICTED,
    }
    if args[0] == "serve":
        container["readinessProbe"] = {"httpGet": {"path": "/healthz", "port": 8080}, "periodSeconds": 1}
    return {"terminationGracePeriodSeconds": 2, "containers": [container], **more}


def workload(kind: str, name: str, replicas: int, **spec) -> dict:
    """A Deployment or StatefulSet of servers."""
    labels = {"app": name}
    template = {"metadata": {"labels": labels}, "spec": pod_spec("serve", "8080")}
    selector = {"matchLabels": labels}
    return {
        "apiVersion": "apps/v1",
        "kind": kind,
        "metadata": {"name": name},
        "spec": {"replicas": replicas, "selector": selector, "template": template, **spec},
    }


def service(name: str, **spec) -> dict:
    """A Service before the pods of `workload`."""
    ports = [{"port": 8080}]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {"selector": {"app": name}, "ports": ports, **spec},
    }


def job(name: str, *args: str, **more) -> dict:
    """A Job of one pod that runs probe once; `more`: fields of its pod."""
    template = {"spec": pod_spec(*args, restartPolicy="Never", **more)}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name},
        "spec": {"backoffLimit": 0, "template": template},
    }
