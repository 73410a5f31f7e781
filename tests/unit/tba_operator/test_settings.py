import dataclasses

import pytest

from tba.contracts.errors import UserError
from tba_operator.settings import VARIABLES, read_settings
from tba_operator.world import Settings


def test_an_empty_environment_gives_the_defaults():
    assert read_settings({"PATH": "/bin", "TBA_WORKERS": " "}) == Settings()


def test_every_setting_has_a_variable():
    assert {field for field, _ in VARIABLES.values()} == {field.name for field in dataclasses.fields(Settings)}


def test_all_variables_are_read():
    settings = read_settings(
        {
            "TBA_NAMESPACE": "ops",
            "TBA_WATCH_NAMESPACES": "a, b,",
            "TBA_TRAINER_IMAGE": "t:1",
            "TBA_SEARCHER_IMAGE": "s:1",
            "TBA_IMAGE_PULL_SECRETS": "pull",
            "TBA_NETWORK_POLICY": "false",
            "TBA_METRICS_NAMESPACE_LABELS": "team=ml,kubernetes.io/metadata.name=monitoring",
            "TBA_RESYNC_SECONDS": "60",
            "TBA_PROGRESS_SECONDS": "2.5",
            "TBA_PROGRESS_THROUGH_API": "true",
            "TBA_WORKERS": "8",
            "TBA_HTTP_PORT": "9090",
            "TBA_IDENTITY": "pod-1",
            "TBA_LEASE_NAME": "other-tba-operator",
        }
    )
    assert settings == Settings(
        namespace="ops",
        watch_namespaces=("a", "b"),
        trainer_image="t:1",
        searcher_image="s:1",
        image_pull_secrets=("pull",),
        network_policy=False,
        metrics_namespace_labels={"team": "ml", "kubernetes.io/metadata.name": "monitoring"},
        resync_seconds=60.0,
        progress_seconds=2.5,
        progress_through_api=True,
        workers=8,
        http_port=9090,
        identity="pod-1",
        lease_name="other-tba-operator",
    )


@pytest.mark.parametrize(
    ("variable", "text", "told"),
    [
        ("TBA_WORKERS", "0", "must be >= 1, got '0'"),
        ("TBA_WORKERS", "four", "must be a whole number, got 'four'"),
        ("TBA_RESYNC_SECONDS", "-1", "must be a number of seconds > 0, got '-1'"),
        ("TBA_RESYNC_SECONDS", "nan", "must be a number of seconds > 0, got 'nan'"),
        ("TBA_NETWORK_POLICY", "off?", "must be true or false, got 'off?'"),
        ("TBA_METRICS_NAMESPACE_LABELS", "team", "must be NAME=VALUE,NAME=VALUE, got 'team'"),
        ("TBA_HTTP_PORT", "70000", "must be a port, 0 to 65535, got '70000'"),
    ],
)
def test_what_cannot_be_read_is_told_with_its_variable(variable, text, told):
    with pytest.raises(UserError) as refused:
        read_settings({variable: text})
    assert f"{variable}: {told}" in str(refused.value)


def test_a_port_that_a_service_link_overwrote_names_the_remedy():
    with pytest.raises(UserError, match="enableServiceLinks: false"):
        read_settings({"TBA_HTTP_PORT": "tcp://10.0.0.1:80"})


def test_all_problems_are_told_at_once():
    with pytest.raises(UserError, match="2 problems"):
        read_settings({"TBA_WORKERS": "x", "TBA_HTTP_PORT": "x"})
