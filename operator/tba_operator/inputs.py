"""What a pod template is made from, read out of a job, and the hash of it all.

Equal hash, no new template: so an upgrade of the controller, whatever it renders, rolls no pod (operator.md §2).
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tba.contracts.config import ConfigMapRef, SecretRef
from tba.contracts.job import Searcher, Trainer
from tba_operator import naming
from tba_operator.api import Images, Job, Role


@dataclass(frozen=True, slots=True)
class Placement:
    """Where Kueue puts a role: node labels and tolerations for its pods, and where these are from."""

    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Mapping[str, Any], ...] = ()
    flavors: tuple[str, ...] = ()
    """Names of the ResourceFlavors that the role was given."""
    updates: tuple[Mapping[str, Any], ...] = ()
    """What admission checks added, as the Workload says it."""


def trainer_inputs(job: Job, images: Images, placement: Placement | None = None) -> str:
    """Hash of what the trainer's pod template depends on; not of the attempt, nor of what only the Job reads."""
    inputs = _common_inputs(job, "trainer", images, placement) | {
        "gpus": gpus_of(job, "trainer"),
        "nodes": job.spec.trainer.nodes if job.spec.trainer.nodes > 1 else None,
        "tokens": {variable: ref.name for variable, ref in token_secrets(job).items()},
        "configMaps": [[ref.name, ref.key] for ref in data_config_maps(job)],
        "claims": data_claims(job),
    }
    return digest(inputs)


def searcher_inputs(job: Job, images: Images, placement: Placement | None = None) -> str:
    """Hash of what the searchers' pod template depends on; not of their number, nor of settings they re-read."""
    return digest(_common_inputs(job, "searcher", images, placement) | {"engine": engine_settings(job)})


def digest(inputs: Mapping[str, Any]) -> str:
    """16 hex digits. What is not set is left out, so that an input added later changes no hash of a job without it."""
    given = {name: value for name, value in inputs.items() if value not in (None, [], {}, "")}
    text = json.dumps(given, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def settings_of(job: Job, role: Role) -> Trainer | Searcher:
    """`spec.<role>`."""
    return job.spec.trainer if role == "trainer" else job.spec.searcher


def image_of(job: Job, role: Role, images: Images) -> str | None:
    """The job's own image, else the resolved default."""
    if role == "trainer" and not brings_engine(job):
        return job.spec.trainer.image or images.trainer
    return settings_of(job, role).image or images.searcher  # which can do both


def brings_engine(job: Job) -> bool:
    """Whether the trainer's pod runs a searcher too, with an engine that the trainer's image does not have."""
    return job.spec.trainer.colocated_searcher.enabled is True and job.spec.searcher.engine.type == "vllm"


def engine_settings(job: Job) -> dict[str, Any]:
    """Of the searchers, as far as they differ from the defaults."""
    return job.spec.searcher.engine.model_dump(mode="json", exclude_defaults=True)


def gpus_of(job: Job, role: Role) -> int:
    """GPUs of a pod for which the job names no device itself."""
    engine, given = job.spec.searcher.engine, job.spec.trainer.gpus_per_node
    if role == "trainer" and given is not None:
        return given
    if engine.type != "vllm":
        return 0
    return 1 if role == "trainer" else engine.tensor_parallel_size


def storage_secret(job: Job, role: Role) -> str | None:
    """Name of the Secret with the role's storage credentials."""
    ref = _credentials(job, role, "secret_ref")
    return ref and ref.name


def workload_identity(job: Job, role: Role) -> str | None:
    """Name of the existing ServiceAccount that the cloud knows."""
    identity = _credentials(job, role, "workload_identity")
    return identity and identity.service_account_name


def service_account(job: Job, role: Role) -> str:
    """Name of the ServiceAccount of a role's pods."""
    return workload_identity(job, role) or naming.role_name(job.name, role)


def token_secrets(job: Job) -> dict[str, SecretRef]:
    """Environment variable -> Secret with HF_TOKEN. Only the trainer reads hubs."""
    task = job.spec.task
    held_out = task.evaluation.prompts
    found = {
        "HF_TOKEN": job.spec.model.secret_ref,
        "TBA_PROMPTS_HF_TOKEN": task.prompts.secret_ref,
        "TBA_EVALUATION_HF_TOKEN": held_out and held_out.secret_ref,
    }
    return {variable: ref for variable, ref in found.items() if ref}


def data_config_maps(job: Job) -> list[ConfigMapRef]:
    """Of prompts and reward code: distinct keys, in order. Only the trainer reads them."""
    task = job.spec.task
    held_out = task.evaluation.prompts
    refs = (task.prompts.config_map_ref, held_out and held_out.config_map_ref, task.reward.config_map_ref)
    distinct = {(ref.name, ref.key): ref for ref in refs if ref}
    return [distinct[key] for key in sorted(distinct)]


def data_claims(job: Job) -> list[str]:
    """PersistentVolumeClaims of model and prompts. Only the trainer reads them."""
    task = job.spec.task
    held_out = task.evaluation.prompts
    uris = (job.spec.model.uri, task.prompts.uri, held_out and held_out.uri)
    return sorted({uri.removeprefix("pvc://").partition("/")[0] for uri in uris if uri and uri.startswith("pvc://")})


def _credentials(job: Job, role: Role, kind: str) -> Any:
    credentials = job.spec.storage.credentials
    own = credentials and (credentials.trainer if role == "trainer" else credentials.searcher)
    return getattr(own or credentials, kind, None)


def _common_inputs(job: Job, role: Role, images: Images, placement: Placement | None) -> dict[str, Any]:
    settings = settings_of(job, role)
    storage = job.spec.storage
    ca = storage.ca_bundle_config_map_ref
    return {
        "image": image_of(job, role, images),
        "imagePullPolicy": settings.image_pull_policy,
        "imagePullSecrets": settings.image_pull_secrets,
        "command": settings.command,
        "args": settings.args,
        "env": settings.env,
        "envFrom": settings.env_from,
        "resources": settings.resources,
        "podMetadata": settings.pod_template.metadata,
        "podSpec": settings.pod_template.spec,
        "terminationGracePeriodSeconds": settings.termination_grace_period_seconds,
        "priorityClassName": job.spec.run_policy.priority_class_name,
        "storage": storage.uri,
        "secret": storage_secret(job, role),
        "serviceAccount": workload_identity(job, role),
        "ca": [ca.name, ca.key] if ca else None,
        # Not what the flavors hold: an administrator who edits one must not restart every run that has it.
        "flavors": list(placement.flavors) if placement else None,
        "placementUpdates": [dict(update) for update in placement.updates] if placement else None,
    }
