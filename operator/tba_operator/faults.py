"""What is wrong with a job, read off its pods, refused writes and the trainer's own alerts: what, got, remedy. Pure.

Texts that Kubernetes rewrites again and again (back-off times, restart counts) are left out, so that a job whose
trouble does not change is not written.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tba_operator import attempts, naming
from tba_operator.api import Images, Job, Role
from tba_operator.attempts import Course
from tba_operator.podstate import NO_EXIT_CODE
from tba_operator.world import ApplyError, Ended, Manifest, Observed, Pod, Ref

ORDER = (
    "InvalidSpec",
    "InvalidPodTemplate",
    "NameConflict",
    "Forbidden",
    "WriteFailed",
    "QuotaExceeded",
    "SecretNotFound",
    "ConfigMapNotFound",
    "ServiceAccountNotFound",
    "VolumeNotMounted",
    "ImagePullFailed",
    "OOMKilled",
    "SearcherError",
    "StorageUnreachable",
    "RolloutStuck",
    "CrashLoop",
    "NodeLost",
    "Unschedulable",
    "SyncStalled",
    "NoRewardSignal",
)
"""Reasons of Degraded, the most telling first: causes before what follows from them."""
UNSCHEDULABLE_SECONDS = 30.0
"""Pods of a cluster that is about to add a node are not worth an alarm."""
_MAX_WORDS = 600
_ROLES: Mapping[str, Role] = {"StatefulSet": "searcher", "Job": "trainer"}
_BROKEN_ROLLOUT = frozenset(ORDER[: ORDER.index("RolloutStuck")]) | {"CrashLoop"}
_PULL_REASONS = frozenset(
    {
        "ErrImagePull",
        "ImagePullBackOff",
        "InvalidImageName",
        "ErrImageNeverPull",
        "ImageInspectError",
        "RegistryUnavailable",
        "SignatureValidationFailed",
    }
)
_REFUSED_BY_KUBELET = frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError"})
_QUOTA_REMEDY = (
    "The pods are created when there is room: raise the ResourceQuota, or lower spec.searcher.replicas or resources."
)
_TOLD_BY_RANK_0 = (attempts.UNAVAILABLE, attempts.USER_ERROR)
_NOT_FOUND = re.compile(r'(secret|configmap|serviceaccount) "([^"]+)" not found', re.IGNORECASE)
_NO_KEY = re.compile(r"(?:find key \S+ in|references non-existent) (secret|configmap|config)\b", re.IGNORECASE)
_WORDS = {"secret": "Secret", "configmap": "ConfigMap", "config": "ConfigMap", "serviceaccount": "ServiceAccount"}
_CAUSE = re.compile(r"^Back-off pulling image \"[^\"]+\"(?:: \w+: )?")
_IMAGE = re.compile(r'image "([^"]+)"')


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong."""

    reason: str
    message: str
    """What, got, remedy."""

    @property
    def rank(self) -> int:
        """Place in `ORDER`."""
        return ORDER.index(self.reason)


@dataclass(frozen=True, slots=True)
class _Scene:
    job: Job
    observed: Observed
    images: Images
    course: Course
    now: float


def faults(
    job: Job, observed: Observed, now: float, *, images: Images, course: Course, running: bool
) -> tuple[Fault, ...]:
    """All that is wrong, the most telling first, each reason once. A job that should have no pods misses none."""
    scene = _Scene(job, observed, images, course, now)
    found = [*_of_writes(scene), *_of_lost_pods(scene)]
    if running:
        found += [*_of_images(scene), *_of_creations(scene), *_of_trainer(scene), *_of_searchers(scene)]
        found += [*_of_rollout(scene), *_of_voice(scene)]
    merged: dict[str, list[str]] = {}
    for fault in sorted(found, key=lambda f: f.rank):
        merged.setdefault(fault.reason, []).append(fault.message)
    return tuple(Fault(reason, " ".join(dict.fromkeys(texts))) for reason, texts in merged.items())


# -- writes


def _of_writes(scene: _Scene) -> Iterator[Fault]:
    wanted = naming.trainer_job(scene.job.name, scene.course.number)
    for ref, error in sorted(scene.observed.errors.items(), key=lambda item: str(item[0])):
        # What became of an attempt that is not wanted any more is no matter.
        fault = _of_write(ref, error) if ref.kind != "Job" or ref.name == wanted else None
        if fault is not None:
            yield fault


def _of_write(ref: Ref, error: ApplyError) -> Fault | None:
    said = _sentence(error.message)
    if error.kind == "InvalidPodTemplate":
        role = _ROLES.get(ref.kind)
        remedy = f"Correct spec.{role} (podTemplate, env, resources)" if role else "Correct the spec"
        again = "it is tried again when the spec changes, and now and then in case a policy did"
        return Fault("InvalidPodTemplate", f"{ref} was refused: {said}. {remedy}; {again}.")
    if error.kind == "QuotaExceeded":
        return Fault("QuotaExceeded", f"{ref} was refused: {said}. {_QUOTA_REMEDY}")
    if error.kind == "NameConflict":
        return Fault("NameConflict", f"{said}.")
    if error.kind == "Forbidden":
        return Fault("Forbidden", f"{ref} was refused: {said}. Give the controller's ServiceAccount the right to it.")
    if error.kind == "Unavailable":
        return Fault(
            "WriteFailed",
            f"The API server cannot do what the job needs: {said}. "
            "It is tried again and again: look at its webhooks and at its own log.",
        )
    return None  # a namespace that goes away takes the job with it


def _of_images(scene: _Scene) -> Iterator[Fault]:
    for role, image in (("trainer", scene.images.trainer), ("searcher", scene.images.searcher)):
        if not image:
            yield Fault(
                "InvalidSpec",
                f"spec.{role}.image is not set and the controller has no default: set it, or the chart's image values.",
            )


def _of_creations(scene: _Scene) -> Iterator[Fault]:
    for message in scene.observed.create_failures:
        named = _missing(scene.job, message)
        if "exceeded quota" in message:
            yield Fault("QuotaExceeded", f"Pods cannot be created: {_sentence(message)}. {_QUOTA_REMEDY}")
        elif named is not None:
            yield named
        else:
            yield Fault(
                "InvalidPodTemplate",
                f"Pods cannot be created: {_sentence(message)}. Correct podTemplate, or the policy that refuses it.",
            )


# -- pods


def _of_lost_pods(scene: _Scene) -> Iterator[Fault]:
    lost = [pod for pod in scene.observed.pods if attempts.is_lost(pod, scene.observed, scene.now)]
    for role in ("trainer", "searcher"):
        names = sorted(f"{pod.name} (node {pod.node})" for pod in lost if pod.role == role)
        if names:
            then = "the next attempt takes over" if role == "trainer" else "they are removed by force and made anew"
            yield Fault(
                "NodeLost",
                f"The nodes of {role} pods do not answer: {_listed(names)}; {then}. "
                "Mend the nodes or delete their Node objects.",
            )


def _of_trainer(scene: _Scene) -> Iterator[Fault]:
    pod = scene.course.pod
    if pod is not None and (pod.ready or pod.deletion_deadline is not None):
        return
    yield from _of_other_nodes(scene)
    own = _of_pod(scene, pod) if pod is not None and not pod.over else None
    if own is not None:
        yield own
        return
    end = attempts.last_end(scene.observed)
    # Another attempt was made for a reason: how the one before it ended is history.
    if end is not None and end[0].attempt == scene.course.number:
        fault = _of_end(scene, end[0], end[1])
        if fault is not None:
            yield fault


def _of_other_nodes(scene: _Scene) -> Iterator[Fault]:
    """Why rank 0 waits for pods of other nodes, or has ended with one."""
    for pod in scene.course.others:
        if pod.ready or pod.deletion_deadline is not None:
            continue
        fault = (None if pod.over else _of_pod(scene, pod)) or _of_node_end(scene, pod)
        if fault is not None:
            yield fault


def _of_node_end(scene: _Scene, pod: Pod) -> Fault | None:
    """How the last pod of this one's node and attempt ended, unless all nodes end so: that is rank 0's to tell."""
    end = attempts.last_end(scene.observed, pod.node_rank)
    told = end is not None and end[0].attempt == pod.attempt and end[1].exit_code not in _TOLD_BY_RANK_0
    return _of_end(scene, *end) if end is not None and told else None


def _of_searchers(scene: _Scene) -> Iterator[Fault]:
    grouped: dict[str, list[tuple[Pod, Fault]]] = {}
    for pod, fault in _broken_searchers(scene):
        grouped.setdefault(fault.reason, []).append((pod, fault))
    for reason, same in grouped.items():
        others = len(same) - 1
        more = (
            f" So do {others} more searcher pods."
            if others > 1
            else " So does one more searcher pod."
            if others
            else ""
        )
        yield Fault(reason, same[0][1].message + more)


def _broken_searchers(scene: _Scene) -> Iterator[tuple[Pod, Fault]]:
    for pod in sorted(scene.observed.pods, key=lambda p: p.name):
        if pod.role != "searcher" or pod.ready or pod.deletion_deadline is not None:
            continue
        end = pod.ended or pod.last_ended
        fault = _of_pod(scene, pod) or (_of_end(scene, pod, end) if end is not None else None)
        if fault is not None:
            yield pod, fault


def _of_pod(scene: _Scene, pod: Pod) -> Fault | None:
    """What holds up a pod that has not ended."""
    reason, message = pod.waiting_reason, pod.waiting_message or ""
    if reason in _PULL_REASONS:
        return _image_fault(scene, pod, message)
    if reason == "FailedMount" or reason in _REFUSED_BY_KUBELET:
        return _missing(scene.job, message, pod) or _start_fault(pod, message)
    since = pod.unschedulable_since if pod.unschedulable_since is not None else pod.created
    if pod.unschedulable is not None and scene.now >= since + UNSCHEDULABLE_SECONDS:
        return Fault(
            "Unschedulable",
            f"No node takes pod {pod.name}: {_sentence(pod.unschedulable)}. "
            f"The job waits: add nodes, or lower spec.{pod.role}.resources or loosen its podTemplate.",
        )
    return None


def _image_fault(scene: _Scene, pod: Pod, message: str) -> Fault:
    named = _IMAGE.search(message)
    image = named[1] if named else getattr(scene.images, pod.role)
    cause = _sentence(_CAUSE.sub("", message))
    return Fault(
        "ImagePullFailed",
        f"Pod {pod.name} cannot pull image {image}{cause and f': {cause}'}. "
        f"Check the tag in spec.{pod.role}.image, or name the registry's Secret in spec.{pod.role}.imagePullSecrets.",
    )


def _start_fault(pod: Pod, message: str) -> Fault:
    if pod.waiting_reason == "FailedMount":
        said = f"A volume of pod {pod.name} cannot be mounted: {_sentence(message)}"
        return Fault("VolumeNotMounted", f"{said}. Check what spec.{pod.role} and spec.model refer to.")
    return Fault(
        "InvalidPodTemplate",
        f"The node cannot start pod {pod.name}: {_sentence(message)}. Correct spec.{pod.role} (command, podTemplate).",
    )


def _of_end(scene: _Scene, pod: Pod, end: Ended) -> Fault | None:
    """Why a container is not running now, if its last end is something to tell."""
    if pod.disrupted or end.exit_code in (0, attempts.TERMINATED, attempts.FENCED):
        return None
    if end.reason == "OOMKilled":
        lower = "trainer.microBatchTokens" if pod.role == "trainer" else "searcher.engine.maxNumSeqs"
        return Fault(
            "OOMKilled",
            f"Pod {pod.name} ran out of memory (exit code {end.exit_code}). "
            f"Raise {pod.role}.resources.limits.memory or lower {lower}.",
        )
    if end.exit_code == attempts.UNAVAILABLE:
        return _storage_fault(scene.job, f"Pod {pod.name} gave up: {_words(end)}")
    if end.exit_code == attempts.USER_ERROR:
        # Of a trainer it is the job's end.
        return Fault("SearcherError", f"Pod {pod.name}: {_words(end)}.") if pod.role == "searcher" else None
    code = f"exit code {end.exit_code}, {end.reason}" if end.exit_code != NO_EXIT_CODE else end.reason
    return Fault("CrashLoop", f"Pod {pod.name} ended ({code}): {_words(end)}.")


def _of_rollout(scene: _Scene) -> Iterator[Fault]:
    found = searcher_set(scene.observed)
    status = (found or {}).get("status") or {}
    newest, current = status.get("updateRevision"), status.get("currentRevision")
    if not newest or newest == current:
        return
    broken = [
        (pod, fault)
        for pod, fault in _broken_searchers(scene)
        if pod.revision == newest and fault.reason in _BROKEN_ROLLOUT
    ]
    if broken:
        yield Fault(
            "RolloutStuck",
            f"The searchers' new pod template stops at pod {broken[0][0].name} ({broken[0][1].reason}); the others "
            "keep the old one. Correct or revert spec.searcher: pods of the broken template are replaced at once.",
        )


# -- what the trainer says


def _of_voice(scene: _Scene) -> Iterator[Fault]:
    progress = attempts.voice(scene.observed, scene.course.pod)
    if progress is None:
        return
    alerts = {alert.reason: alert.message for alert in progress.alerts}
    for reason, message in alerts.items():
        yield Fault(reason, f"{_sentence(message)}.")
    if progress.state == "WaitingForStorage" and "StorageUnreachable" not in alerts:
        yield _storage_fault(scene.job, f"The trainer waits for storage: {_sentence(progress.detail)}")


def _storage_fault(job: Job, what: str) -> Fault:
    return Fault(
        "StorageUnreachable",
        f"{what.rstrip('.: ')}. Check spec.storage (uri {job.spec.storage.uri}, endpoint, credentials); "
        "the run goes on when it answers.",
    )


# -- what is missing


def _missing(job: Job, message: str, pod: Pod | None = None) -> Fault | None:
    """A Secret, ConfigMap or ServiceAccount, or a key in one of the first two, that a pod needs."""
    whose = f" that pod {pod.name} needs" if pod is not None else ""
    absent, keyless = _NOT_FOUND.search(message), _NO_KEY.search(message)
    if absent is not None:
        word = _WORDS[absent[1].lower()]
        said = f"{word} {job.namespace}/{absent[2]}{whose} does not exist. Create it{_remedy(job, word, absent[2])}"
        return Fault(f"{word}NotFound", f"{said}; the pod starts by itself then.")
    if keyless is not None:
        word = _WORDS[keyless[1].lower()]
        return Fault(f"{word}NotFound", f"A {word}{whose} lacks a key: {_sentence(message)}. Add the key to it.")
    return None


def _remedy(job: Job, word: str, name: str) -> str:
    """What goes on after `Create it`."""
    if word == "ServiceAccount":
        return " or correct workloadIdentity.serviceAccountName in spec.storage.credentials"
    keys = _keys(job, word, name)
    return f" with {keys}" if keys else ""


def _keys(job: Job, word: str, name: str) -> str:
    """The keys that the job expects in it."""
    spec = job.spec
    prompts = [p for p in (spec.task.prompts, spec.task.evaluation.prompts) if p is not None]
    if word == "ConfigMap":
        maps = [spec.storage.ca_bundle_config_map_ref, spec.task.reward.config_map_ref]
        maps += [p.config_map_ref for p in prompts]
        return ", ".join(dict.fromkeys(ref.key for ref in maps if ref is not None and ref.name == name))
    keys: list[str] = []
    credentials = spec.storage.credentials
    if credentials is not None:
        stores = [credentials.secret_ref, *(r.secret_ref for r in (credentials.trainer, credentials.searcher) if r)]
        if any(ref is not None and ref.name == name for ref in stores):
            keys += ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"]
    tokens = [spec.model.secret_ref, *(p.secret_ref for p in prompts)]
    if any(ref is not None and ref.name == name for ref in tokens):
        keys.append("HF_TOKEN")
    return " and ".join(keys)


def searcher_set(observed: Observed) -> Manifest | None:
    """The StatefulSet, if it is there."""
    return next((child for ref, child in observed.children.items() if ref.kind == "StatefulSet"), None)


# -- words


def _words(end: Ended) -> str:
    return _sentence(end.message) or "no last words"


def _sentence(text: str) -> str:
    """One line, not too long, without its full stop."""
    line = " ".join(text.split())
    return (line if len(line) <= _MAX_WORDS else f"{line[: _MAX_WORDS - 1]}…").rstrip(".")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
