"""Every CEL rule of the CRD, without a cluster; test_crd_admission.py tries the same cases on a real API server."""

import pytest
from pydantic import ValidationError
from support.crd_cases import CASES, FROZEN, RELEASE, SHAPE, job_with, tries
from support.jobs import SMALLEST
from support.structural import admit, violations

from tba.contracts.config import Buffer, Reward
from tba.contracts.errors import UserError
from tba.contracts.job import TBAJob
from tba.contracts.supported import refuse_unsupported
from tba_operator.crd import custom_resource_definition
from tba_operator.rules import RULES, unchanged

SCHEMA = custom_resource_definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]


def messages(data, stored=None):
    old = None if stored is None else admit(SCHEMA, stored)
    return [told for _, told in violations(SCHEMA, admit(SCHEMA, data), old)]


def is_of(rule_id, message):
    rule = next(r for r in RULES if r.id == rule_id)
    return message.startswith(rule.what)


@pytest.mark.parametrize(("rule", "stored", "job", "told"), tries())
def test_a_rule_refuses_exactly_what_its_cases_say(rule, stored, job, told):
    found = [m for m in messages(job, stored) if is_of(rule, m)]
    if told is None:
        assert not found
    else:
        assert found
        assert told in found[0]


@pytest.mark.parametrize(("rule", "stored", "job", "told"), tries())
def test_an_accepted_case_breaks_no_other_rule(rule, stored, job, told):
    assert told is not None or not messages(job, stored)


def test_every_rule_has_an_accepted_and_a_refused_case():
    assert {c.rule for c in CASES if c.accepted} == {c.rule for c in CASES if c.refused} == {r.id for r in RULES}
    assert len({r.id for r in RULES}) == len(RULES)


def test_rules_about_changes_have_cases_with_a_stored_job():
    assert {c.rule for c in CASES if c.stored is not None} == {r.id for r in RULES if r.forbids_change}


def test_the_smallest_job_breaks_no_rule_as_a_new_one_and_as_its_own_update():
    assert not messages(SMALLEST)
    assert not messages(SMALLEST, SMALLEST)


def test_a_default_written_out_is_no_change():
    written = TBAJob.model_validate(SMALLEST).model_dump(mode="json")
    assert not messages(written, SMALLEST)


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.id)
def test_a_message_says_what_to_do_and_fits_a_cel_string(rule):
    assert rule.remedy
    assert not set("'%") & set(rule.what + rule.remedy)
    assert "\n" not in rule.message
    assert len(rule.message) < 400
    assert not rule.of or rule.got.count("%") == len(rule.of)
    assert rule.got or rule.forbids_change


@pytest.mark.parametrize("case", SHAPE + RELEASE, ids=lambda c: c.rule)
def test_the_command_line_refuses_what_the_api_server_refuses(case):
    for patch in case.refused:
        with pytest.raises((ValidationError, UserError)):
            refuse_unsupported(TBAJob.model_validate(job_with(patch)).spec.run_config())


@pytest.mark.parametrize(
    "job", [job for _, stored, job, told in tries() if told is None and stored is None], ids=lambda j: str(j["spec"])
)
def test_the_command_line_accepts_what_the_api_server_accepts(job):
    refuse_unsupported(TBAJob.model_validate(job).spec.run_config())


IDENTITY = ("frozen-model", "frozen-task", "frozen-reward", "frozen-objective", "frozen-buffer")


@pytest.mark.parametrize("case", [c for c in FROZEN if c.rule in IDENTITY], ids=lambda c: c.rule)
def test_the_run_record_calls_the_same_fields_frozen(case):
    """What a running job may not change in the API server is what the trainer refuses on resume, and no more."""
    identity = TBAJob.model_validate(job_with(case.stored)).spec.run_config().identity()
    for patch in case.accepted:
        assert TBAJob.model_validate(job_with(case.stored, patch)).spec.run_config().identity() == identity
    for patch in case.refused:
        assert TBAJob.model_validate(job_with(case.stored, patch)).spec.run_config().identity() != identity


def test_a_field_that_is_added_to_a_frozen_section_is_frozen():
    assert "self.capacityPerPrompt == oldSelf.capacityPerPrompt" in unchanged(Buffer)
    assert "has(self.entrypoint) == has(oldSelf.entrypoint)" in unchanged(Reward)
    assert "timeoutSeconds" not in unchanged(Reward, besides=["timeout_seconds"])
