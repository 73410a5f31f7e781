import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tba.contracts.config import Storage
from tba.contracts.errors import UserError
from tba.contracts.explain import field_names
from tba.store.protocol import AccessDenied, NotFound
from tba.store.retry import Transient, WrongIdentity
from tba.store.s3_errors import classify, classify_broken, classify_message


def body(code: str) -> str:
    return f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>why</Message></Error>"


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (500, "InternalError", Transient),
        (503, "SlowDown", Transient),
        (429, "TooManyRequests", Transient),
        (409, "ConditionalRequestConflict", Transient),
        (400, "RequestTimeout", Transient),
        (400, "ExpiredToken", Transient),
        (404, "NoSuchKey", NotFound),
        (404, "NoSuchBucket", UserError),
        (403, "AccessDenied", AccessDenied),
        (403, "SignatureDoesNotMatch", WrongIdentity),
        (403, "RequestTimeTooSkewed", UserError),
        (301, "PermanentRedirect", UserError),
        (501, "NotImplemented", UserError),
        (400, "InvalidArgument", UserError),
    ],
)
def test_each_answer_has_one_meaning(status, code, kind):
    assert type(classify(status, body(code), "s3://b/k")) is kind


def test_a_skewed_clock_says_so_and_what_to_do():
    error = classify(403, body("RequestTimeTooSkewed"), "s3://b/k")
    assert type(error) is UserError
    assert "s3://b/k" in str(error) and "RequestTimeTooSkewed" in str(error) and "NTP" in str(error)


def test_status_and_code_are_found_in_the_clients_message():
    reply = f"503 Service Unavailable: {body('SlowDown')}"
    text = f"Generic S3 error: Error performing PUT x in 1ms - Server returned non-2xx status code: {reply}\n\nDebug"
    assert str(classify_message(text, "s3://b/k")) == "server answered 503 SlowDown"
    redirect = "Received redirect without LOCATION, this normally indicates an incorrectly configured region"
    assert "region" in str(classify_message(redirect, "s3://b/k"))


def test_a_broken_connection_may_pass_but_a_certificate_does_not_heal():
    refused = 'HTTP error: error sending request\n kind: Connect ... message: "Connection refused"'
    assert str(classify_broken(refused, "s")) == "HTTP error: error sending request (Connection refused)"
    assert isinstance(classify_broken("SSLCertVerificationError: CERTIFICATE_VERIFY_FAILED", "s"), UserError)


def test_the_remedy_for_an_unknown_certificate_names_what_can_be_set():
    told = str(classify_broken("SSLCertVerificationError: CERTIFICATE_VERIFY_FAILED", "s"))
    assert "AWS_CA_BUNDLE" in told
    assert all(name in field_names(Storage) for name in re.findall(r"storage\.(\w+)", told))


@given(st.integers(300, 599), st.text(max_size=200))
def test_any_answer_is_classified_and_only_404_is_not_found(status, text):
    error = classify(status, text, "s3://b/k")
    assert isinstance(error, UserError | Transient | NotFound)
    assert isinstance(error, NotFound) <= (status == 404)
    assert isinstance(error, Transient) >= (status in (500, 502, 503, 504))
