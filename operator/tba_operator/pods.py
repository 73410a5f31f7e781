"""Pod templates of trainer and searcher.

Our pod with the fields of `spec.<role>`, the user's `podTemplate` laid over it, then Kueue's placement, then what
follows from the whole (devices, threads, grace) and the labels that select it. `restricted` Pod Security admits it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tba_operator import naming
from tba_operator.api import Images, Job, Role
from tba_operator.inputs import (
    Placement,
    data_claims,
    data_config_maps,
    digest,
    engine_settings,
    gpus_of,
    image_of,
    service_account,
    settings_of,
    storage_secret,
    token_secrets,
)
from tba_operator.overlay import overlay

USER = 65532
CONFIG_DIR = "/etc/tba/config"
CREDENTIALS_DIR = "/var/run/secrets/tba/storage"
CA_DIR = "/etc/tba/ca"
CONFIG_MAPS_DIR = "/etc/tba/configmaps"
PVC_DIR = "/mnt/pvc"
SPOOL_DIR = "/var/spool/tba"
TERMINATION_PATH = "/dev/termination-log"
GPU = "nvidia.com/gpu"
ENGINE_ANNOTATION = "tba.dev/engine-hash"
"""A searcher reads engine settings only when it starts: a change of them must make new pods."""
_STOP_MARGIN_SECONDS = 15
"""Between the end of a process's own grace period and the kubelet's SIGKILL."""
_UNDISTURBED = {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false", "karpenter.sh/do-not-disrupt": "true"}
"""A trainer moved to save a node loses the steps since its checkpoint; searchers lose nothing and may be moved."""


@dataclass(frozen=True, slots=True)
class _Mount:
    name: str
    path: str
    source: Mapping[str, Any]
    """One volume source, as in a pod's spec."""
    read_only: bool = False


def trainer_template(job: Job, images: Images, attempt: int, placement: Placement | None = None) -> dict[str, Any]:
    """PodTemplateSpec of a trainer Job."""
    mounts = [*_common_mounts(job, "trainer"), *_data_mounts(job)]
    if gpus_of(job, "trainer"):
        mounts.append(_shared_memory())
    spec = {
        # Each end of the process becomes a pod's end, which the Job's failure policy judges.
        "restartPolicy": "Never",
        "subdomain": naming.role_name(job.name, "trainer"),
        **_pod_spec(job, "trainer", mounts),
        "containers": [_container(job, "trainer", images, _trainer_env(job, attempt), mounts)],
    }
    metadata = {"labels": naming.labels(job.name, "trainer", attempt)}
    return _finish(job, "trainer", {"annotations": _UNDISTURBED, "spec": spec}, metadata, placement)


def searcher_template(job: Job, images: Images, placement: Placement | None = None) -> dict[str, Any]:
    """PodTemplateSpec of the searcher StatefulSet."""
    mounts = [*_common_mounts(job, "searcher"), _Mount("spool", SPOOL_DIR, {"emptyDir": {}})]
    if job.spec.searcher.engine.type == "vllm":
        mounts.append(_shared_memory())
    env = [_field("TBA_NAME", "metadata.name"), _value("TBA_SPOOL_DIR", SPOOL_DIR)]
    spec = _pod_spec(job, "searcher", mounts) | {
        "containers": [_container(job, "searcher", images, env, mounts)],
        # Soft: a lost node should not take all searchers, yet one node may hold them all.
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": naming.selector_labels(job.name, "searcher")},
            }
        ],
    }
    metadata = {
        "labels": naming.labels(job.name, "searcher"),
        "annotations": {ENGINE_ANNOTATION: digest(engine_settings(job))},
    }
    return _finish(job, "searcher", {"spec": spec}, metadata, placement)


def _finish(
    job: Job, role: Role, template: Mapping[str, Any], reserved: Mapping[str, Any], placement: Placement | None
) -> dict[str, Any]:
    """The whole template; `reserved` metadata wins over the user's."""
    user = settings_of(job, role).pod_template
    metadata = overlay({"annotations": template.get("annotations", {})}, user.metadata)
    spec = overlay(overlay(None, template["spec"]), user.spec)
    if placement is not None:
        given = {"nodeSelector": dict(placement.node_selector), "tolerations": list(placement.tolerations)}
        spec = overlay(spec, {name: value for name, value in given.items() if value})
    container = _find(spec.get("containers"), naming.CONTAINER[role])
    if container is not None:
        _give_gpus(container, gpus_of(job, role))
        _derive_env(container, spec.get("terminationGracePeriodSeconds"))
    return {"metadata": overlay(metadata, reserved), "spec": spec}


def _pod_spec(job: Job, role: Role, mounts: list[_Mount]) -> dict[str, Any]:
    settings = settings_of(job, role)
    return {
        "serviceAccountName": service_account(job, role),
        # Nothing here talks to the API server. With workload identity the cloud's webhook projects its own token.
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        # The kernel drops SIGTERM to a process 1 without a handler, and Python needs a second to set one: a pod deleted
        # in that second would sit out its whole grace period. With this, process 1 is the sandbox's.
        "shareProcessNamespace": True,
        "imagePullSecrets": settings.image_pull_secrets or None,
        "priorityClassName": job.spec.run_policy.priority_class_name,
        "terminationGracePeriodSeconds": settings.termination_grace_period_seconds,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "volumes": [{"name": mount.name, **mount.source} for mount in mounts],
    }


def _container(job: Job, role: Role, images: Images, env: list[dict[str, Any]], mounts: list[_Mount]) -> dict[str, Any]:
    """The role's container. No CPU or memory but what the job gives: the right amount depends on the model, a request
    too large keeps pods off nodes and a limit too small kills them; a LimitRange may say what a namespace wants."""
    settings = settings_of(job, role)
    return {
        "name": naming.CONTAINER[role],
        "image": image_of(job, role, images),  # none: the API server refuses it and names the field
        "imagePullPolicy": settings.image_pull_policy,
        "command": settings.command or None,
        # Our program's argument is nothing to a command of the user's.
        "args": settings.args or (None if settings.command else [role]),
        "ports": [{"name": "http", "containerPort": naming.HTTP_PORT, "protocol": "TCP"}],
        "env": overlay([*_common_env(job, role), *env], settings.env, "env"),
        "envFrom": settings.env_from or None,
        "resources": settings.resources or None,
        "volumeMounts": [
            {"name": m.name, "mountPath": m.path} | ({"readOnly": True} if m.read_only else {}) for m in mounts
        ],
        # Answers come as soon as imports are done, before the model is loaded; loading counts as progress.
        "startupProbe": _probe("/healthz", period_seconds=10, failures=60),
        "livenessProbe": _probe("/healthz", period_seconds=10, failures=3),
        "readinessProbe": _probe("/readyz", period_seconds=5, failures=3),
        "terminationMessagePath": TERMINATION_PATH,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
        },
    }


def _probe(path: str, *, period_seconds: int, failures: int) -> dict[str, Any]:
    return {
        "httpGet": {"path": path, "port": "http"},
        "periodSeconds": period_seconds,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }


# -- what follows from the merged pod


def _find(entries: Any, name: str) -> dict[str, Any] | None:
    items = entries if isinstance(entries, list) else []
    return next((item for item in items if isinstance(item, dict) and item.get("name") == name), None)


def _give_gpus(container: dict[str, Any], count: int) -> None:
    """Unless the user named devices of any kind, be it 0 of them."""
    resources = container.get("resources", {})
    if not count or not isinstance(resources, dict) or "claims" in resources:
        return
    if any("/" in name for part in ("limits", "requests") for name in _names(resources.get(part))):
        return
    container["resources"] = overlay(resources, {"limits": {GPU: str(count)}})


def _derive_env(container: dict[str, Any], grace_seconds: Any) -> None:
    """Variables that the user did not set."""
    env = container.get("env")
    if not isinstance(env, list):
        return
    if isinstance(grace_seconds, int) and _find(env, "TBA_GRACE_SECONDS") is None:
        own = max(grace_seconds - _STOP_MARGIN_SECONDS, grace_seconds / 2)
        env.append(_value("TBA_GRACE_SECONDS", f"{own:g}"))
    # Else each process starts a thread for every core of the node, whatever its share of it.
    resources = container.get("resources")
    parts = resources if isinstance(resources, dict) else {}
    bound = next((part for part in ("limits", "requests") if "cpu" in _names(parts.get(part))), None)
    if bound and _find(env, "OMP_NUM_THREADS") is None:
        reference = {"resourceFieldRef": {"resource": f"{bound}.cpu", "divisor": "1"}}  # rounded up
        env.append({"name": "OMP_NUM_THREADS", "valueFrom": reference})


def _names(mapping: Any) -> list[str]:
    return [str(name) for name in mapping] if isinstance(mapping, Mapping) else []


# -- environment


def _value(name: str, value: str) -> dict[str, Any]:
    return {"name": name, "value": value}


def _field(name: str, path: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _common_env(job: Job, role: Role) -> list[dict[str, Any]]:
    env = [
        _value("HOME", "/tmp"),
        _value("HF_HOME", "/tmp/hf"),
        _value("TBA_CONFIG", CONFIG_DIR),
        _value("TBA_PORT", str(naming.HTTP_PORT)),
        _value("TBA_STORAGE", job.spec.storage.uri),
        _value("TBA_TERMINATION_PATH", TERMINATION_PATH),
        _field("TBA_POD_UID", "metadata.uid"),
    ]
    if storage_secret(job, role):
        env.append(_value("TBA_CREDENTIALS_DIR", CREDENTIALS_DIR))
    if ca := job.spec.storage.ca_bundle_config_map_ref:
        env.append(_value("AWS_CA_BUNDLE", f"{CA_DIR}/{ca.key}"))
    return env


def _trainer_env(job: Job, attempt: int) -> list[dict[str, Any]]:
    env = [
        {"name": variable, "valueFrom": {"secretKeyRef": {"name": ref.name, "key": "HF_TOKEN"}}}
        for variable, ref in token_secrets(job).items()
    ]
    # Searchers that somebody starts elsewhere say nothing of how many pods are needed.
    env.append(_value("TBA_SEARCHER_SET", naming.role_name(job.name, "searcher")))
    if data_config_maps(job):
        env.append(_value("TBA_CONFIG_MAPS_DIR", CONFIG_MAPS_DIR))
    if data_claims(job):
        env.append(_value("TBA_PVC_DIR", PVC_DIR))
    if (ranks := gpus_of(job, "trainer")) > 1:
        env.append(_value("TBA_TRAINER_RANKS", str(ranks)))
    if job.spec.trainer.nodes > 1:
        env += [
            _value("TBA_TRAINER_NODES", str(job.spec.trainer.nodes)),
            _field("TBA_TRAINER_NODE_RANK", f"metadata.labels['{naming.INDEX_LABEL}']"),
            _value("TBA_RENDEZVOUS", naming.rendezvous(job.name, attempt)),
            # Random, another for each attempt, and known to those alone who may read the namespace's pods or Jobs.
            _field("TBA_RENDEZVOUS_TOKEN", f"metadata.labels['{naming.JOB_UID_LABEL}']"),
        ]
    return env


# -- volumes


def _common_mounts(job: Job, role: Role) -> list[_Mount]:
    config = {"configMap": {"name": naming.config_map(job.name)}}
    mounts = [_Mount("config", CONFIG_DIR, config, read_only=True), _Mount("tmp", "/tmp", {"emptyDir": {}})]
    if secret := storage_secret(job, role):
        mounts.append(_Mount("storage", CREDENTIALS_DIR, {"secret": {"secretName": secret}}, read_only=True))
    if ca := job.spec.storage.ca_bundle_config_map_ref:
        source = {"configMap": {"name": ca.name, "items": [{"key": ca.key, "path": ca.key}]}}
        mounts.append(_Mount("ca", CA_DIR, source, read_only=True))
    return mounts


def _data_mounts(job: Job) -> list[_Mount]:
    """Prompts, reward code and model that the trainer reads from the cluster."""
    mounts = []
    if refs := data_config_maps(job):
        # One projected volume: a ConfigMap's name may be too long for a volume's.
        sources = [
            {"configMap": {"name": r.name, "items": [{"key": r.key, "path": f"{r.name}/{r.key}"}]}} for r in refs
        ]
        mounts.append(_Mount("configmaps", CONFIG_MAPS_DIR, {"projected": {"sources": sources}}, read_only=True))
    for number, claim in enumerate(data_claims(job)):
        # Read-only as a volume too, else the kubelet hands the user's files over to our group.
        source = {"persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
        mounts.append(_Mount(f"pvc-{number}", f"{PVC_DIR}/{claim}", source, read_only=True))
    return mounts


def _shared_memory() -> _Mount:
    """NCCL and vLLM's workers need more than the 64 MiB that container runtimes give."""
    return _Mount("dshm", "/dev/shm", {"emptyDir": {"medium": "Memory"}})
