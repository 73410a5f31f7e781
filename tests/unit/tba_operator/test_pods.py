"""Pod templates: what the workloads are promised, what a user may change, what a new template is made for."""

import copy
import json
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from support.jobs import smallest

from tba_operator.api import ATTEMPT_LABEL, JOB_LABEL, ROLE_LABEL, Images, parse_job
from tba_operator.inputs import Placement, searcher_inputs, trainer_inputs
from tba_operator.pods import ENGINE_ANNOTATION, GPU, searcher_template, trainer_template

PAGE = Path(__file__).parents[3] / "docs/how-to/kubernetes-placement.md"
SNIPPETS = [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)]
IMAGES = Images(trainer="tba-trainer:1", searcher="tba-searcher:1")
SECRET = {"uri": "s3://b/run", "credentials": {"secretRef": {"name": "tba-s3"}}}
EVERYTHING = {
    "model": {"uri": "pvc://models/llama", "secretRef": {"name": "hub"}},
    "task": {
        "prompts": {"configMapRef": {"name": "data.v1", "key": "train.jsonl"}, "secretRef": {"name": "hub2"}},
        "reward": {"configMapRef": {"name": "reward", "key": "reward.py"}},
        "evaluation": {"prompts": {"uri": "pvc://held-out/test.jsonl", "secretRef": {"name": "hub3"}}},
    },
    "storage": SECRET | {"caBundleConfigMapRef": {"name": "ca", "key": "ca.crt"}},
    "runPolicy": {"priorityClassName": "high"},
    "trainer": {"resources": {"limits": {"cpu": "4", "memory": "8Gi"}}},
    "searcher": {"engine": {"type": "vllm", "tensorParallelSize": 2}},
}


def job(name="gsm8k", **spec):
    return parse_job(smallest(**spec) | {"metadata": {"name": name, "namespace": "team", "uid": "u"}})


def trainer(*, placement=None, **spec):
    return trainer_template(job(**spec), IMAGES, 3, placement)


def searcher(*, placement=None, **spec):
    return searcher_template(job(**spec), IMAGES, placement)


def container(template, name=None):
    return next(c for c in template["spec"]["containers"] if name in (None, c["name"]))


def env(template):
    return {e["name"]: e.get("value", e.get("valueFrom")) for e in container(template)["env"]}


def mounts(template):
    """Path -> (volume source, read-only)."""
    volumes = {v["name"]: {k: s for k, s in v.items() if k != "name"} for v in template["spec"]["volumes"]}
    return {m["mountPath"]: (volumes[m["name"]], m.get("readOnly", False)) for m in container(template)["volumeMounts"]}


def with_template(role, **template):
    return {role: {"podTemplate": template}}


def searcher_with(fields):
    """Fields of the searcher's container by way of the pod template."""
    return searcher(**with_template("searcher", spec={"containers": [{"name": "searcher", **fields}]}))


# -- Pod Security


ALLOWED_VOLUMES = {
    "configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret",
}  # fmt: skip


def violations(spec):
    """Of Pod Security Standard `restricted` (and so of `baseline`). Source: kubernetes.io Pod Security Standards."""
    pod = spec.get("securityContext", {})
    found = [field for field in ("hostNetwork", "hostPID", "hostIPC") if spec.get(field)]
    found += [v["name"] for v in spec.get("volumes", []) if not ALLOWED_VOLUMES.issuperset(v.keys() - {"name"})]
    found += ["sysctls"] if pod.get("sysctls") else []
    for item in [*spec.get("initContainers", []), *spec["containers"]]:
        own = item.get("securityContext", {})
        both = pod | own
        drops, adds = (own.get("capabilities", {}).get(kind, []) for kind in ("drop", "add"))
        checks = {
            "privileged": not own.get("privileged"),
            "allowPrivilegeEscalation": own.get("allowPrivilegeEscalation") is False,
            "runAsNonRoot": both.get("runAsNonRoot") is True,
            "runAsUser": both.get("runAsUser") != 0,
            "seccompProfile": both.get("seccompProfile", {}).get("type") in ("RuntimeDefault", "Localhost"),
            "capabilities": "ALL" in drops and not set(adds) - {"NET_BIND_SERVICE"},
            "procMount": own.get("procMount", "Default") == "Default",
            "seLinuxOptions": "seLinuxOptions" not in both,
            "hostPort": not any(port.get("hostPort") for port in item.get("ports", [])),
            "probeHost": not any(
                "host" in item.get(p, {}).get("httpGet", {}) for p in ("livenessProbe", "startupProbe")
            ),
        }
        found += [f"{item['name']}: {check}" for check, passed in checks.items() if not passed]
    return found


@pytest.mark.parametrize("render", [trainer, searcher])
@pytest.mark.parametrize("spec", [{}, EVERYTHING], ids=["smallest", "everything"])
def test_restricted_pod_security_admits_the_pod(render, spec):
    assert violations(render(**spec)["spec"]) == []


@pytest.mark.parametrize(
    "change",
    [
        {"hostNetwork": True},
        {"securityContext": {"seccompProfile": {"type": "Unconfined"}}},
        {"volumes": [{"name": "x", "hostPath": {"path": "/"}}]},
        {"containers": [{"name": "trainer", "securityContext": {"capabilities": {"add": ["SYS_PTRACE"]}}}]},
        {"containers": [{"name": "trainer", "securityContext": {"runAsUser": 0}}]},
        {"initContainers": [{"name": "bare", "image": "i"}]},
    ],
)
def test_the_rules_find_what_a_user_breaks(change):
    assert violations(trainer(**with_template("trainer", spec=change))["spec"])


@pytest.mark.parametrize("render", [trainer, searcher])
def test_no_pod_gets_a_token_of_the_api_server_and_none_writes_to_its_image(render):
    template = render(**EVERYTHING)
    assert template["spec"]["automountServiceAccountToken"] is False
    assert container(template)["securityContext"]["readOnlyRootFilesystem"] is True


@pytest.mark.parametrize("spec", SNIPPETS, ids=range(len(SNIPPETS)))
def test_every_example_of_the_placement_page_is_admitted_and_mounts_what_it_has(spec):
    for template in (trainer(**spec), searcher(**spec)):
        assert violations(template["spec"]) == []
        assert mounts(template)


# -- environment and mounts


def test_the_trainer_finds_everything_it_reads():
    template = trainer(**EVERYTHING)
    assert env(template) == {
        "HOME": "/tmp",
        "HF_HOME": "/tmp/hf",
        "TBA_CONFIG": "/etc/tba/config",
        "TBA_PORT": "8080",
        "TBA_STORAGE": "s3://b/run",
        "TBA_TERMINATION_PATH": "/dev/termination-log",
        "TBA_POD_UID": {"fieldRef": {"fieldPath": "metadata.uid"}},
        "TBA_CREDENTIALS_DIR": "/var/run/secrets/tba/storage",
        "AWS_CA_BUNDLE": "/etc/tba/ca/ca.crt",
        "HF_TOKEN": {"secretKeyRef": {"name": "hub", "key": "HF_TOKEN"}},
        "TBA_PROMPTS_HF_TOKEN": {"secretKeyRef": {"name": "hub2", "key": "HF_TOKEN"}},
        "TBA_EVALUATION_HF_TOKEN": {"secretKeyRef": {"name": "hub3", "key": "HF_TOKEN"}},
        "TBA_CONFIG_MAPS_DIR": "/etc/tba/configmaps",
        "TBA_PVC_DIR": "/mnt/pvc",
        "TBA_SEARCHER_SET": "gsm8k-searcher",
        "TBA_GRACE_SECONDS": "585",
        "OMP_NUM_THREADS": {"resourceFieldRef": {"resource": "limits.cpu", "divisor": "1"}},
    }
    sources = [
        {"configMap": {"name": "data.v1", "items": [{"key": "train.jsonl", "path": "data.v1/train.jsonl"}]}},
        {"configMap": {"name": "reward", "items": [{"key": "reward.py", "path": "reward/reward.py"}]}},
    ]
    assert mounts(template) == {
        "/etc/tba/config": ({"configMap": {"name": "gsm8k-config"}}, True),
        "/tmp": ({"emptyDir": {}}, False),
        "/var/run/secrets/tba/storage": ({"secret": {"secretName": "tba-s3"}}, True),
        "/etc/tba/ca": ({"configMap": {"name": "ca", "items": [{"key": "ca.crt", "path": "ca.crt"}]}}, True),
        "/etc/tba/configmaps": ({"projected": {"sources": sources}}, True),
        "/mnt/pvc/held-out": ({"persistentVolumeClaim": {"claimName": "held-out", "readOnly": True}}, True),
        "/mnt/pvc/models": ({"persistentVolumeClaim": {"claimName": "models", "readOnly": True}}, True),
        "/dev/shm": ({"emptyDir": {"medium": "Memory"}}, False),
    }


def test_a_searcher_reads_the_bucket_and_nothing_else_of_the_cluster():
    template = searcher(**EVERYTHING)
    assert env(template) == {
        "HOME": "/tmp",
        "HF_HOME": "/tmp/hf",
        "TBA_CONFIG": "/etc/tba/config",
        "TBA_PORT": "8080",
        "TBA_STORAGE": "s3://b/run",
        "TBA_TERMINATION_PATH": "/dev/termination-log",
        "TBA_POD_UID": {"fieldRef": {"fieldPath": "metadata.uid"}},
        "TBA_CREDENTIALS_DIR": "/var/run/secrets/tba/storage",
        "AWS_CA_BUNDLE": "/etc/tba/ca/ca.crt",
        "TBA_NAME": {"fieldRef": {"fieldPath": "metadata.name"}},
        "TBA_SPOOL_DIR": "/var/spool/tba",
        "TBA_GRACE_SECONDS": "45",
    }
    assert set(mounts(template)) == {
        "/etc/tba/config", "/tmp", "/var/run/secrets/tba/storage", "/etc/tba/ca", "/var/spool/tba", "/dev/shm",
    }  # fmt: skip


def test_each_role_has_its_own_credentials():
    storage = {
        "uri": "s3://b/run",
        "credentials": {
            "trainer": {"workloadIdentity": {"serviceAccountName": "cloud"}},
            "searcher": {"secretRef": {"name": "read-mostly"}},
        },
    }
    learns, searches = trainer(storage=storage), searcher(storage=storage)
    assert learns["spec"]["serviceAccountName"] == "cloud"
    assert "TBA_CREDENTIALS_DIR" not in env(learns)
    assert searches["spec"]["serviceAccountName"] == "gsm8k-searcher"
    assert mounts(searches)["/var/run/secrets/tba/storage"][0] == {"secret": {"secretName": "read-mostly"}}


@pytest.mark.parametrize(("seconds", "own"), [(600, "585"), (60, "45"), (30, "15"), (20, "10"), (5, "2.5"), (0, "0")])
def test_a_process_stops_before_the_kubelet_kills_it(seconds, own):
    assert env(trainer(trainer={"terminationGracePeriodSeconds": seconds}))["TBA_GRACE_SECONDS"] == own


@pytest.mark.parametrize("render", [trainer_template, searcher_template])
def test_a_process_is_never_process_1_which_would_miss_an_early_sigterm(render):
    arguments = (job(), IMAGES, 1) if render is trainer_template else (job(), IMAGES)
    assert render(*arguments)["spec"]["shareProcessNamespace"] is True


def test_a_grace_period_of_the_pod_template_is_told_to_the_process():
    template = trainer(**with_template("trainer", spec={"terminationGracePeriodSeconds": 100}))
    assert env(template)["TBA_GRACE_SECONDS"] == "85"


def test_threads_follow_the_cpu_share_and_are_not_set_without_one():
    request = {"trainer": {"resources": {"requests": {"cpu": "2500m"}}}}
    assert env(trainer(**request))["OMP_NUM_THREADS"]["resourceFieldRef"]["resource"] == "requests.cpu"
    assert "OMP_NUM_THREADS" not in env(trainer())
    chosen = request["trainer"] | {"env": [{"name": "OMP_NUM_THREADS", "value": "7"}]}
    assert env(trainer(trainer=chosen))["OMP_NUM_THREADS"] == "7"


# -- devices and placement


@pytest.mark.parametrize(
    ("spec", "trainer_gpus", "searcher_gpus"),
    [
        ({}, "1", "1"),
        ({"searcher": {"engine": {"tensorParallelSize": 4}}}, "1", "4"),
        ({"trainer": {"gpusPerNode": 0}}, None, "1"),
        ({"searcher": {"engine": {"type": "transformers"}}}, None, None),
        ({"searcher": {"engine": {"type": "fake"}}, "trainer": {"gpusPerNode": 1}}, "1", None),
        ({"trainer": {"gpusPerNode": 4}}, "4", "1"),
    ],
)
def test_gpus_follow_from_the_engine(spec, trainer_gpus, searcher_gpus):
    given = [container(t(**spec)).get("resources", {}).get("limits", {}).get(GPU) for t in (trainer, searcher)]
    assert given == [trainer_gpus, searcher_gpus]


@pytest.mark.parametrize(("gpus", "ranks"), [(None, None), (0, None), (1, None), (2, "2"), (8, "8")])
def test_a_trainer_of_several_gpus_starts_a_rank_for_each(gpus, ranks):
    spec = {} if gpus is None else {"trainer": {"gpusPerNode": gpus}}
    given = {e["name"]: e.get("value") for e in container(trainer(**spec)).get("env", [])}
    assert given.get("TBA_TRAINER_RANKS") == ranks
    assert "TBA_TRAINER_RANKS" not in {e["name"] for e in container(searcher(**spec)).get("env", [])}


@pytest.mark.parametrize(
    "resources",
    [{"limits": {"amd.com/gpu": 1}}, {"requests": {"nvidia.com/mig-1g.10gb": 1}},
     {"limits": {GPU: 0}}],
)  # fmt: skip
def test_devices_that_the_user_names_are_the_only_ones(resources):
    assert container(searcher(searcher={"resources": resources}))["resources"] == resources
    assert container(searcher_with({"resources": resources}))["resources"] == resources


def test_a_device_claim_takes_the_place_of_a_gpu():
    claim = {"resources": {"claims": [{"name": "gpu"}]}}
    assert container(searcher_with(claim))["resources"] == claim["resources"]


def test_cpu_and_memory_of_the_user_stand_beside_the_gpu():
    found = container(searcher(searcher={"resources": {"limits": {"memory": "8Gi"}}}))["resources"]
    assert found == {"limits": {"memory": "8Gi", GPU: "1"}}


def test_a_cpu_engine_needs_no_shared_memory():
    assert "/dev/shm" not in mounts(searcher(searcher={"engine": {"type": "transformers"}}))


def test_only_the_trainer_refuses_to_be_moved():
    protected = {"cluster-autoscaler.kubernetes.io/safe-to-evict", "karpenter.sh/do-not-disrupt"}
    assert protected <= trainer()["metadata"]["annotations"].keys()
    assert not protected & searcher()["metadata"]["annotations"].keys()


def test_searchers_spread_over_nodes_if_they_can():
    (spread,) = searcher()["spec"]["topologySpreadConstraints"]
    assert (spread["topologyKey"], spread["whenUnsatisfiable"]) == ("kubernetes.io/hostname", "ScheduleAnyway")
    assert spread["labelSelector"]["matchLabels"].items() <= searcher()["metadata"]["labels"].items()


def test_kueues_placement_joins_the_users_and_wins_where_they_disagree():
    flavor = Placement({"pool": "spot"}, ({"key": "spot", "operator": "Exists"},))
    user = {"nodeSelector": {"pool": "any", "zone": "a"}, "tolerations": [{"key": "gpu", "operator": "Exists"}]}
    spec = searcher(placement=flavor, **with_template("searcher", spec=user))["spec"]
    assert spec["nodeSelector"] == {"pool": "spot", "zone": "a"}
    assert [t["key"] for t in spec["tolerations"]] == ["gpu", "spot"]


# -- the user's fields


def test_fields_of_the_role_reach_its_container():
    fields = {
        "image": "mine:2",
        "imagePullPolicy": "Always",
        "imagePullSecrets": [{"name": "registry"}],
        "args": ["trainer", "--threads", "2"],
        "env": [{"name": "A", "value": "1"}, {"name": "TBA_STORAGE", "value": "s3://other/run"}],
        "envFrom": [{"secretRef": {"name": "more"}}],
        "resources": {"limits": {"memory": "8Gi"}},
    }
    template = trainer(trainer=fields)
    found = container(template)
    assert found["image"] == "mine:2" and found["imagePullPolicy"] == "Always"
    assert found["args"] == ["trainer", "--threads", "2"] and "command" not in found
    assert found["envFrom"] == fields["envFrom"]
    assert env(template)["A"] == "1" and env(template)["TBA_STORAGE"] == "s3://other/run"
    assert template["spec"]["imagePullSecrets"] == [{"name": "registry"}]


def test_a_command_of_the_users_gets_no_argument_of_ours():
    found = container(trainer(trainer={"command": ["sleep"]}))
    assert found["command"] == ["sleep"] and "args" not in found
    assert container(trainer())["args"] == ["trainer"]


def test_a_sidecar_stands_beside_the_container_named_like_the_role():
    pod = {
        "containers": [{"name": "proxy", "image": "p"}, {"name": "searcher", "env": [{"name": "A", "value": "1"}]}],
        "nodeSelector": {"pool": "spot"},
        "topologySpreadConstraints": [{"topologyKey": "zone"}],
    }
    template = searcher(**with_template("searcher", spec=pod))
    assert [c["name"] for c in template["spec"]["containers"]] == ["searcher", "proxy"]
    assert env(template)["A"] == "1" and env(template)["TBA_NAME"]
    assert template["spec"]["topologySpreadConstraints"] == [{"topologyKey": "zone"}]


def test_labels_that_select_a_pod_cannot_be_overridden_and_others_are_added():
    theirs = {JOB_LABEL: "other", ROLE_LABEL: "x", ATTEMPT_LABEL: "9", "azure.workload.identity/use": "true"}
    labels = trainer(**with_template("trainer", metadata={"labels": theirs}))["metadata"]["labels"]
    assert (labels[JOB_LABEL], labels[ROLE_LABEL], labels[ATTEMPT_LABEL]) == ("gsm8k", "trainer", "3")
    assert labels["azure.workload.identity/use"] == "true"


def test_a_user_may_let_the_trainer_be_moved():
    allowed = {"karpenter.sh/do-not-disrupt": "false"}
    metadata = trainer(**with_template("trainer", metadata={"annotations": allowed}))["metadata"]
    assert metadata["annotations"]["karpenter.sh/do-not-disrupt"] == "false"


def test_no_variable_stands_twice_however_often_it_is_given():
    pod = {"containers": [{"name": "trainer", "env": [{"name": "A", "value": "3"}, {"name": "HOME", "value": "/x"}]}]}
    spec = {
        "trainer": {"env": [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}], "podTemplate": {"spec": pod}}
    }
    names = [e["name"] for e in container(trainer(**spec))["env"]]
    assert len(names) == len(set(names))
    assert env(trainer(**spec))["A"] == "3" and env(trainer(**spec))["HOME"] == "/x"


NONSENSE = st.recursive(
    st.none() | st.booleans() | st.integers(0, 2) | st.sampled_from(["trainer", "cpu", ""]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["name", "env", "limits", "labels", "resources", "cpu"]), inner, max_size=3)
    ),
    max_leaves=6,
)
POD_FIELDS = st.sampled_from(
    ["containers", "volumes", "terminationGracePeriodSeconds", "nodeSelector", "tolerations", "securityContext"]
)


@given(st.dictionaries(POD_FIELDS, NONSENSE, max_size=3))
def test_no_pod_template_breaks_the_rendering(pod):
    place = Placement({"a": "b"}, ({"key": "x"},))
    assert json.dumps(trainer(**with_template("trainer", spec=pod), placement=place))


@pytest.mark.parametrize("render", [trainer, searcher])
@pytest.mark.parametrize("spec", [{}, EVERYTHING], ids=["smallest", "everything"])
def test_no_null_reaches_the_api_server(render, spec):
    assert "null" not in json.dumps(render(**spec))


# -- when a new template is made


def changed(path, value, base=EVERYTHING):
    spec = copy.deepcopy(base)
    *parents, last = path.split(".")
    place = spec
    for part in parents:
        place = place.setdefault(part, {})
    place[last] = value
    return job(**spec)


NEW_TRAINER = {
    "trainer.image": "x",
    "trainer.imagePullPolicy": "Always",
    "trainer.imagePullSecrets": [{"name": "x"}],
    "trainer.command": ["x"],
    "trainer.args": ["x"],
    "trainer.env": [{"name": "A", "value": "1"}],
    "trainer.envFrom": [{"secretRef": {"name": "x"}}],
    "trainer.resources": {"limits": {"cpu": "5"}},
    "trainer.gpusPerNode": 0,
    "trainer.podTemplate": {"spec": {"nodeSelector": {"a": "b"}}},
    "trainer.terminationGracePeriodSeconds": 30,
    "runPolicy.priorityClassName": "low",
    "storage.credentials": {"secretRef": {"name": "rotated"}},
    "storage.caBundleConfigMapRef": {"name": "ca", "key": "other.crt"},
    "model.secretRef": {"name": "x"},
}
NEW_SEARCHERS = {
    "searcher.image": "x",
    "searcher.env": [{"name": "A", "value": "1"}],
    "searcher.resources": {"limits": {"cpu": "5"}},
    "searcher.podTemplate": {"metadata": {"labels": {"a": "b"}}},
    "searcher.engine.tensorParallelSize": 4,
    "searcher.engine.gpuMemoryUtilization": 0.5,
    "searcher.engine.extraArgs": {"enforceEager": True},
    "runPolicy.priorityClassName": "low",
    "storage.credentials": {"workloadIdentity": {"serviceAccountName": "cloud"}},
    "storage.caBundleConfigMapRef": {"name": "other", "key": "ca.crt"},
}
NOT_A_NEW_TEMPLATE = {
    "suspend": True,
    "searcher.replicas": 7,
    "searcher.minAvailable": 2,
    "searcher.autoscaling": {"mode": "Managed", "maxReplicas": 9},
    "searcher.samplesPerPrompt": 30,
    "trainer.microBatchTokens": 4096,
    "sync": {"intervalSteps": 5},
    "buffer": {"maxReplayRatio": 3},
    "storage.endpoint": "http://s3",
    "storage.checkpoints": {"everySteps": 9},
    "runPolicy.backoffLimit": 2,
    "runPolicy.failureRules": [{"action": "Ignore", "onExitCodes": [9]}],
}


@pytest.mark.parametrize(("path", "value"), NEW_TRAINER.items())
def test_what_the_trainer_pod_is_made_from_changes_its_hash(path, value):
    assert trainer_inputs(changed(path, value), IMAGES) != trainer_inputs(job(**EVERYTHING), IMAGES)


@pytest.mark.parametrize(("path", "value"), NEW_SEARCHERS.items())
def test_what_searchers_are_made_from_changes_their_hash(path, value):
    assert searcher_inputs(changed(path, value), IMAGES) != searcher_inputs(job(**EVERYTHING), IMAGES)


@pytest.mark.parametrize(("path", "value"), NOT_A_NEW_TEMPLATE.items())
def test_what_no_pod_is_made_from_changes_neither_hash_nor_template(path, value):
    before, after = job(**EVERYTHING), changed(path, value)
    assert trainer_inputs(before, IMAGES) == trainer_inputs(after, IMAGES)
    assert searcher_inputs(before, IMAGES) == searcher_inputs(after, IMAGES)
    assert trainer_template(before, IMAGES, 1) == trainer_template(after, IMAGES, 1)
    assert searcher_template(before, IMAGES) == searcher_template(after, IMAGES)


@pytest.mark.parametrize(("path", "value"), (NEW_TRAINER | NEW_SEARCHERS | NOT_A_NEW_TEMPLATE).items())
def test_equal_hash_means_equal_template(path, value):
    before, after = job(**EVERYTHING), changed(path, value)
    if trainer_inputs(before, IMAGES) == trainer_inputs(after, IMAGES):
        assert trainer_template(before, IMAGES, 1) == trainer_template(after, IMAGES, 1)
    if searcher_inputs(before, IMAGES) == searcher_inputs(after, IMAGES):
        assert searcher_template(before, IMAGES) == searcher_template(after, IMAGES)


def test_images_and_placement_are_inputs():
    plain = job()
    place = Placement({"a": "b"}, flavors=("spot",))
    assert trainer_inputs(plain, IMAGES) != trainer_inputs(plain, Images(trainer="x", searcher="tba-searcher:1"))
    assert trainer_inputs(plain, IMAGES) == trainer_inputs(plain, Images(trainer="tba-trainer:1", searcher="x"))
    assert searcher_inputs(plain, IMAGES) != searcher_inputs(plain, IMAGES, place)
    assert searcher_inputs(plain, IMAGES) == searcher_inputs(plain, IMAGES, Placement())
    checked = Placement(updates=({"nodeSelector": {"block": "7"}},))
    assert searcher_inputs(plain, IMAGES) != searcher_inputs(plain, IMAGES, checked)


@pytest.mark.parametrize("inputs", [trainer_inputs, searcher_inputs])
def test_an_edit_of_a_flavor_is_no_new_template(inputs):
    before, after = Placement({"a": "b"}, flavors=("spot",)), Placement({"a": "c"}, ({"key": "x"},), ("spot",))
    assert inputs(job(), IMAGES, before) == inputs(job(), IMAGES, after)


def test_another_engine_is_no_new_template_of_a_trainer_whose_gpus_are_given():
    vllm, fake = ({"searcher": {"engine": {"type": kind}}, "trainer": {"gpusPerNode": 1}} for kind in ("vllm", "fake"))
    assert trainer_inputs(job(**vllm), IMAGES) == trainer_inputs(job(**fake), IMAGES)
    assert trainer_template(job(**vllm), IMAGES, 1) == trainer_template(job(**fake), IMAGES, 1)
    del vllm["trainer"], fake["trainer"]
    assert trainer_inputs(job(**vllm), IMAGES) != trainer_inputs(job(**fake), IMAGES), "its GPU follows the engine"


def test_engine_settings_that_a_searcher_reads_at_its_start_make_new_pods():
    before, after = job(), changed("searcher.engine", {"maxNumSeqs": 8}, base={})
    annotations = [searcher_template(j, IMAGES)["metadata"]["annotations"][ENGINE_ANNOTATION] for j in (before, after)]
    assert annotations[0] != annotations[1]


def test_the_hashes_of_a_job_are_those_of_the_first_release():
    # Others would roll the pods of every job when the operator is upgraded: leave a new input out while it is unset.
    assert trainer_inputs(job(), IMAGES) == "b272a6c5afc38fe1"
    assert searcher_inputs(job(), IMAGES) == "c2ce7c7e89d58bfc"
    assert trainer_inputs(job(**EVERYTHING), IMAGES) == "19672f1512c32db8"
    assert searcher_inputs(job(**EVERYTHING), IMAGES) == "e26f8f3c44bfadb2"


def test_a_trainer_with_an_engine_of_its_own_runs_the_image_that_has_one():
    own = {"colocatedSearcher": {"enabled": True}}
    images = {
        name: container(trainer(trainer=settings, searcher={"engine": {"type": engine}, "replicas": 0}))["image"]
        for name, settings, engine in (
            ("vllm", own, "vllm"), ("cpu", own, "transformers"), ("named", own | {"image": "mine"}, "vllm"),
            ("without", {}, "vllm"),
        )
    }  # fmt: skip
    assert images == {"vllm": "tba-searcher:1", "cpu": "tba-trainer:1", "named": "mine", "without": "tba-trainer:1"}
    assert trainer_inputs(job(trainer=own), IMAGES) != trainer_inputs(job(), IMAGES)
