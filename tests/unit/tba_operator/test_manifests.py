"""The children of a job."""

import copy
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.jobs import smallest

from tba.contracts.config import LiveConfig
from tba.contracts.runfile import RunFile
from tba_operator.api import INPUTS_ANNOTATION, Images, parse_job
from tba_operator.inputs import Placement
from tba_operator.manifests import (
    all_children,
    config_map,
    disruption_budget,
    network_policies,
    rehearsal_pod,
    searcher_inputs,
    searcher_set,
    service_accounts,
    services,
    trainer_inputs,
    trainer_job,
)
from tba_operator.world import Settings

IMAGES = Images(trainer="tba-trainer:1", searcher="tba-searcher:1")
SETTINGS = Settings(namespace="tba-system", metrics_namespace_labels={"team": "monitoring"})
IDENTITY = {"workloadIdentity": {"serviceAccountName": "cloud"}}
NAMES = st.from_regex(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", fullmatch=True)


def job(name="gsm8k", uid="u-1", **spec):
    return parse_job(smallest(**spec) | {"metadata": {"name": name, "namespace": "team", "uid": uid}})


def children(target):
    return all_children(target, SETTINGS, IMAGES)


def strings(value):
    """(key, value) of every label map, and every name, of a manifest."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key in ("labels", "matchLabels", "selector") and all(isinstance(v, str) for v in inner.values()):
                yield from inner.values()
            elif key in ("name", "serviceName", "subdomain", "serviceAccountName") and isinstance(inner, str):
                yield inner
            else:
                yield from strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from strings(inner)


# -- all of them


def test_a_job_has_these_children_in_this_order():
    kinds = [(c["kind"], c["metadata"]["name"]) for c in children(job(searcher={"replicas": 3}))]
    assert kinds == [
        ("ConfigMap", "gsm8k-config"),
        ("ServiceAccount", "gsm8k-trainer"),
        ("ServiceAccount", "gsm8k-searcher"),
        ("Service", "gsm8k-trainer"),
        ("Service", "gsm8k-searcher"),
        ("NetworkPolicy", "gsm8k-trainer"),
        ("NetworkPolicy", "gsm8k-searcher"),
        ("PodDisruptionBudget", "gsm8k-searcher"),
        ("StatefulSet", "gsm8k-searcher"),
        ("Job", "gsm8k-trainer-1"),
    ]


def test_every_child_is_owned_by_the_job_and_carries_its_name():
    owner = {
        "apiVersion": "tba.dev/v1alpha1",
        "kind": "TBAJob",
        "name": "gsm8k",
        "uid": "u-1",
        "controller": True,
        "blockOwnerDeletion": True,
    }
    for child in children(job(searcher={"replicas": 3})):
        assert child["metadata"]["ownerReferences"] == [owner]
        assert child["metadata"]["namespace"] == "team"
        assert child["metadata"]["labels"]["tba.dev/job-name"] == "gsm8k"


def test_a_job_without_uid_has_no_owned_children_since_they_would_be_collected():
    assert all("ownerReferences" not in child["metadata"] for child in children(job(uid="")))


@given(NAMES, st.integers(1, 99999))
def test_every_name_and_label_fits_63_characters(name, attempt):
    everything = [*children(job(name)), trainer_job(job(name), IMAGES, attempt)]
    everything += [rehearsal_pod(child) for child in everything if child["kind"] in ("Job", "StatefulSet")]
    for text in strings(everything):
        assert len(text) <= 63
        assert re.fullmatch(r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?", text)
    names = [child["metadata"]["name"] for child in everything]
    assert all(re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", n) for n in names)
    # What Kubernetes makes of them: a pod's name, and a label with the hash of a template.
    assert len(f"{name}-searcher-4095") <= 63 and len(f"{name}-searcher-1234567890") <= 63


@given(NAMES)
def test_rendering_depends_on_its_arguments_alone(name):
    target = job(name)
    before = copy.deepcopy(target)
    assert json.dumps(children(target)) == json.dumps(children(job(name)))
    assert target == before


@pytest.mark.parametrize("spec", [{}, {"searcher": {"replicas": 0}}, {"storage": {"uri": "s3://b/run"}}])
def test_no_manifest_holds_a_null_or_an_empty_list(spec):
    def holes(value):
        if isinstance(value, dict):
            return any(holes(v) for v in value.values())
        return value is None or value == [] or (isinstance(value, list) and any(holes(v) for v in value))

    assert not [child["kind"] for child in all_children(job(**spec), Settings(), IMAGES) if holes(child)]


# -- ConfigMap


def test_the_config_map_holds_the_two_files_of_a_process():
    target = job()
    data = config_map(target)["data"]
    run, live = RunFile.model_validate_json(data["run.json"]), LiveConfig.model_validate_json(data["live.json"])
    assert run == RunFile(owner="team/gsm8k", name="gsm8k", base_dir=None, config=target.spec.run_config())
    assert live == target.spec.live_config()


@pytest.mark.parametrize(
    "spec",
    [{"sync": {"intervalSteps": 9}}, {"storage": {"uri": "s3://b/run", "endpoint": "http://s3"}},
     {"searcher": {"samplesPerPrompt": 40}}, {"trainer": {"microBatchTokens": 9}}],
)  # fmt: skip
def test_a_live_change_alters_the_live_file_only(spec):
    before, after = config_map(job())["data"], config_map(job(**spec))["data"]
    assert before["run.json"] == after["run.json"]
    assert before["live.json"] != after["live.json"]


@pytest.mark.parametrize(
    "spec",
    [{"buffer": {"maxReplayRatio": 3, "maxPolicyLag": 4}},
     {"task": {"prompts": {"uri": "s3://b/train.jsonl"}, "reward": {"name": "gsm8k", "timeoutSeconds": 60}}}],
)  # fmt: skip
def test_live_fields_that_the_run_file_repeats_leave_the_runs_identity_alone(spec):
    before, after = (RunFile.model_validate_json(config_map(j)["data"]["run.json"]) for j in (job(), job(**spec)))
    assert before.config.identity() == after.config.identity()


@pytest.mark.parametrize("field", ["replicas", "minAvailable", "podDisruptionBudget"])
def test_placement_is_no_part_of_the_configuration(field):
    assert config_map(job()) == config_map(job(searcher={field: 0}))


def test_a_spec_of_300_kilobytes_fits_a_config_map():
    parameters = {"name": "gsm8k", "parameters": {str(n): "é" * 1000 for n in range(150)}}
    target = job(task={"prompts": {"uri": "s3://b/train.jsonl"}, "reward": parameters})
    assert sum(len(text.encode()) for text in config_map(target)["data"].values()) < 2**20


# -- Services, ServiceAccounts


def test_pods_have_names_before_they_are_ready():
    for service in services(job()):
        assert service["spec"]["clusterIP"] == "None"
        assert service["spec"]["publishNotReadyAddresses"] is True
        assert service["spec"]["ports"] == [{"name": "http", "port": 8080, "targetPort": "http", "protocol": "TCP"}]


def test_a_service_selects_the_pods_of_its_role():
    templates = [trainer_job(job(), IMAGES, 1), searcher_set(job(), IMAGES, 1)]
    for service, workload in zip(services(job()), templates, strict=True):
        assert service["spec"]["selector"].items() <= workload["spec"]["template"]["metadata"]["labels"].items()


def test_service_accounts_have_no_token():
    accounts = service_accounts(job())
    assert [a["metadata"]["name"] for a in accounts] == ["gsm8k-trainer", "gsm8k-searcher"]
    assert all(account["automountServiceAccountToken"] is False for account in accounts)


def test_no_account_is_made_for_a_role_with_workload_identity():
    mixed = {"trainer": IDENTITY, "searcher": {"secretRef": {"name": "s"}}}
    made = [
        [a["metadata"]["name"] for a in service_accounts(job(storage={"uri": "s3://b/run", "credentials": c}))]
        for c in (IDENTITY, mixed)
    ]
    assert made == [[], ["gsm8k-searcher"]]


def test_pull_secrets_of_the_chart_lie_in_the_accounts_so_that_a_new_one_rolls_no_pod():
    settings = Settings(image_pull_secrets=("registry",))
    assert service_accounts(job(), settings)[0]["imagePullSecrets"] == [{"name": "registry"}]
    pods = json.dumps([c for c in all_children(job(), settings, IMAGES) if c["kind"] in ("Job", "StatefulSet")])
    assert "registry" not in pods


def test_an_odd_claim_is_left_to_the_api_server_to_judge():
    target = job(model={"uri": "pvc://[models]/llama"})
    volumes = trainer_job(target, IMAGES, 1)["spec"]["template"]["spec"]["volumes"]
    assert [v["persistentVolumeClaim"]["claimName"] for v in volumes if "persistentVolumeClaim" in v] == ["[models]"]


# -- NetworkPolicy


PORT = [{"port": 8080, "protocol": "TCP"}]


def test_the_operator_and_other_trainers_reach_the_trainer():
    trainer, _ = network_policies(job(), Settings(namespace="tba-system"))
    operator, trainers, _ = trainer["spec"]["ingress"]
    assert operator == {
        "from": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "tba-system"}}}],
        "ports": PORT,
    }
    assert trainers == {
        "from": [{"podSelector": {"matchLabels": {"tba.dev/job-name": "gsm8k", "tba.dev/role": "trainer"}}}]
    }


@pytest.mark.parametrize(
    ("labels", "selector"), [({"team": "monitoring"}, {"matchLabels": {"team": "monitoring"}}), ({}, {})]
)
def test_a_searcher_is_reached_by_those_who_scrape_it_only(labels, selector):
    policies = network_policies(job(), Settings(metrics_namespace_labels=labels))
    scraping = {"from": [{"namespaceSelector": selector}], "ports": PORT}
    assert policies[1]["spec"]["ingress"] == [scraping]
    assert policies[0]["spec"]["ingress"][-1] == scraping
    assert all(policy["spec"]["policyTypes"] == ["Ingress"] for policy in policies)


def test_network_policies_can_be_left_out():
    assert network_policies(job(), Settings(network_policy=False)) == []


# -- PodDisruptionBudget


@pytest.mark.parametrize(
    ("replicas", "min_available", "kept"), [(3, 1, 1), (8, 5, 5), (2, 5, 1), (1, 1, None), (0, 1, None), (3, 0, None)]
)
def test_a_budget_keeps_what_it_can(replicas, min_available, kept):
    budget = disruption_budget(job(searcher={"replicas": replicas, "minAvailable": min_available}))
    assert (budget and budget["spec"]["minAvailable"]) == kept


@given(st.integers(0, 4096), st.integers(0, 4096))
def test_a_budget_never_blocks_a_drain_for_ever(replicas, min_available):
    budget = disruption_budget(job(searcher={"minAvailable": min_available}), replicas)
    assert budget is None or 1 <= budget["spec"]["minAvailable"] < replicas


def test_a_budget_follows_the_count_that_the_set_is_scaled_to():
    target = job(searcher={"replicas": 1, "autoscaling": {"mode": "Managed", "maxReplicas": 9}})
    assert disruption_budget(target) is None
    assert disruption_budget(target, 5)["spec"]["minAvailable"] == 1


def test_a_budget_can_be_declined():
    assert disruption_budget(job(searcher={"replicas": 3, "podDisruptionBudget": False})) is None


# -- trainer Job


def decide(rules, *, exit_code, disrupted=False):
    """As the Job controller: the first rule that fits, or Count."""
    for rule in rules:
        if "onPodConditions" in rule and disrupted:
            return rule["action"]
        if "onExitCodes" in rule and exit_code in rule["onExitCodes"]["values"]:
            return rule["action"]
    return "Count"


@pytest.mark.parametrize(
    ("exit_code", "disrupted", "action"),
    [(1, False, "Count"), (137, False, "Count"), (137, True, "Ignore"), (1, True, "Ignore"), (64, False, "FailJob"),
     (3, False, "FailJob"), (2, False, "Ignore"), (143, False, "Ignore")],
)  # fmt: skip
def test_how_a_trainers_end_is_judged(exit_code, disrupted, action):
    rules = trainer_job(job(), IMAGES, 1)["spec"]["podFailurePolicy"]["rules"]
    assert decide(rules, exit_code=exit_code, disrupted=disrupted) == action


def test_a_users_rule_comes_first():
    policy = {
        "failureRules": [{"action": "FailJob", "onExitCodes": [143, 9, 9]}, {"action": "Count", "onExitCodes": [2]}]
    }
    rules = trainer_job(job(runPolicy=policy), IMAGES, 1)["spec"]["podFailurePolicy"]["rules"]
    assert rules[0]["onExitCodes"]["values"] == [9, 143]  # the API server wants them ordered and once each
    assert decide(rules, exit_code=143, disrupted=True) == "FailJob"
    assert decide(rules, exit_code=2) == "Count"


def test_there_is_one_trainer_pod_at_a_time_and_the_job_never_gives_up_by_itself():
    spec = trainer_job(job(), IMAGES, 7)["spec"]
    assert (spec["completions"], spec["parallelism"], spec["completionMode"]) == (1, 1, "Indexed")
    assert spec["podReplacementPolicy"] == "Failed"
    assert spec["backoffLimit"] == 2**31 - 1
    assert spec["template"]["spec"]["restartPolicy"] == "Never"
    assert not {"ttlSecondsAfterFinished", "activeDeadlineSeconds"} & spec.keys()


def test_attempts_differ_in_name_and_label_only():
    first, second = (json.dumps(trainer_job(job(), IMAGES, attempt)) for attempt in (1, 2))
    assert first.replace("trainer-1", "trainer-2").replace('attempt": "1"', 'attempt": "2"') == second


# -- searcher StatefulSet


def test_searchers_start_together_and_stay_in_one_set():
    manifest = searcher_set(job(), IMAGES, 5)
    assert manifest["spec"]["replicas"] == 5
    assert manifest["spec"]["podManagementPolicy"] == "Parallel"
    assert manifest["spec"]["serviceName"] == services(job())[1]["metadata"]["name"]
    labels = manifest["spec"]["template"]["metadata"]["labels"]
    assert manifest["spec"]["selector"]["matchLabels"].items() <= labels.items()


def test_the_hash_of_the_inputs_stands_on_the_object_and_not_on_its_pods():
    place = Placement({"a": "b"})
    for manifest, inputs in (
        (trainer_job(job(), IMAGES, 1, place), trainer_inputs(job(), IMAGES, place)),
        (searcher_set(job(), IMAGES, 1, place), searcher_inputs(job(), IMAGES, place)),
    ):
        assert manifest["metadata"]["annotations"] == {INPUTS_ANNOTATION: inputs}
        assert INPUTS_ANNOTATION not in json.dumps(manifest["spec"])


def test_a_change_of_the_count_changes_nothing_else():
    few, many = searcher_set(job(), IMAGES, 1), searcher_set(job(searcher={"replicas": 9}), IMAGES, 9)
    many["spec"]["replicas"] = 1
    assert few == many


# -- rehearsal


def test_a_rehearsal_is_the_pod_of_the_template_without_an_account_that_may_not_exist_yet():
    manifest = trainer_job(job(), IMAGES, 1)
    pod = rehearsal_pod(manifest)
    template = manifest["spec"]["template"]
    assert (pod["kind"], pod["metadata"]["namespace"]) == ("Pod", "team")
    assert pod["metadata"]["labels"] == template["metadata"]["labels"]
    assert pod["spec"] | {"serviceAccountName": "gsm8k-trainer"} == template["spec"]
    assert "serviceAccountName" not in pod["spec"]
