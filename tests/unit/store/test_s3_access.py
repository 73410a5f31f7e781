from pathlib import Path

import pytest

from tba.contracts.errors import UserError
from tba.store.access import connect, find_credentials, locate, static_credentials
from tba.store.retry import RetryPolicy


def at(uri: str, *, endpoint=None, region=None, style=None, ca=None, **environ: str):
    return locate(uri, endpoint=endpoint, region=region, force_path_style=style, ca_bundle=ca, environ=environ)


def test_a_root_may_be_empty_or_nested():
    assert (at("s3://bucket").root, at("s3://bucket/").uri) == ("", "s3://bucket")
    assert at("s3://bucket").path("latest") == "latest"
    nested = at("s3://bucket/team/run/")
    assert (nested.root, nested.uri, nested.path("a/b")) == ("team/run", "s3://bucket/team/run", "team/run/a/b")


def test_arguments_come_before_the_s3_variable_and_that_before_the_general_one():
    general = {"AWS_ENDPOINT_URL": "http://general:1"}
    assert at("s3://b").endpoint is None
    assert at("s3://b", **general).endpoint == "http://general:1"
    assert at("s3://b", AWS_ENDPOINT_URL_S3="http://s3:1/", **general).endpoint == "http://s3:1"
    assert at("s3://b", endpoint="http://argument:1", AWS_ENDPOINT_URL_S3="http://s3:1").endpoint == "http://argument:1"
    assert at("s3://b", AWS_REGION="r1", AWS_DEFAULT_REGION="r2").region == "r1"
    assert at("s3://b", region="r0", AWS_REGION="r1").region == "r0"


def test_an_endpoint_of_ones_own_means_path_style_unless_told():
    assert not at("s3://b").path_style
    assert at("s3://b", endpoint="http://h").path_style
    assert not at("s3://b", endpoint="http://h", style=False).path_style
    assert at("s3://b", style=True).path_style


@pytest.mark.parametrize(
    ("uri", "options"),
    [
        ("s3://", {}),
        ("s3:///prefix", {}),
        ("s3://b/a//b", {}),
        ("s3://b/../c", {}),
        ("s3://b/k?x=1", {}),
        ("s3://b", {"endpoint": "minio:9000"}),
        ("s3://b", {"endpoint": "ftp://h"}),
        # Over these the client would raise what nobody expects, or panic amid a request.
        ("s3://[b]/x", {}),
        ("s3://b c/x", {}),
        ("s3://host:9/b", {}),
        ("s3://b", {"endpoint": "http://h:9000a"}),
        ("s3://b", {"endpoint": "http://h:99999"}),
        ("s3://b", {"endpoint": "http://[::1"}),
        ("s3://b", {"endpoint": "http://[host]:9000"}),
        ("s3://b", {"endpoint": "http://my host:9000"}),
        ("s3://b", {"endpoint": "http://256.0.0.1:9000"}),
        ("s3://b", {"ca": Path("no-such-file.pem")}),
    ],
)
def test_a_malformed_place_is_refused_with_what_was_given(uri, options):
    with pytest.raises(UserError, match="got|give"):
        at(uri, **options)


@pytest.mark.parametrize("endpoint", ["http://[::1]:9000", "https://my_minio", "http://10.0.0.1:1", "HTTP://H-1.x:9"])
def test_what_the_client_can_reach_is_an_endpoint(endpoint):
    assert at("s3://b.c_d-1", endpoint=endpoint).endpoint == endpoint


def test_a_ca_is_known_by_its_content_and_a_changed_file_is_another_location(tmp_path):
    bundle = tmp_path / "ca.crt"
    bundle.write_text("one")
    first = at("s3://b", AWS_CA_BUNDLE=str(bundle))
    assert first == at("s3://b", ca=bundle) and first.ca_bundle == "one"
    bundle.write_text("two")
    assert at("s3://b", ca=bundle) != first


def test_a_ca_that_is_no_certificate_is_the_users_error(tmp_path):
    bundle = tmp_path / "ca.crt"
    bundle.write_text("no certificate")
    keys = static_credentials("a", "s")
    with pytest.raises(UserError, match="CA bundle for s3://b holds no certificate.*give PEM"):
        connect(at("s3://b", ca=bundle), keys, RetryPolicy())


def test_keys_in_the_environment_are_used_with_their_token():
    found = find_credentials({"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "s", "AWS_SESSION_TOKEN": "t"})()
    assert (found["access_key_id"], found["secret_access_key"], found.get("token")) == ("a", "s", "t")


def test_a_profile_is_found_by_the_chain(tmp_path, monkeypatch):
    path = tmp_path / "credentials"
    path.write_text("[default]\naws_access_key_id = a\naws_secret_access_key = s\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(path))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    assert find_credentials({})()["access_key_id"] == "a"


def test_no_credentials_anywhere_is_the_users_error(tmp_path, monkeypatch):
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    with pytest.raises(UserError, match="AWS_ACCESS_KEY_ID"):
        find_credentials({})
