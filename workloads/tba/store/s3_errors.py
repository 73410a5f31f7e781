"""What an S3 failure means: wait and try again, or tell the user what to change.

obstore gives the HTTP status and the server's XML only inside its message, so both are parsed from it.
"""

import re

from tba.contracts.errors import UserError
from tba.store.protocol import AccessDenied, NotFound
from tba.store.retry import Transient, WrongIdentity

# 4xx codes that another attempt can cure: races, slow bodies, damage in transit, a token about to be renewed.
_PASSING_CODES = {
    "BadDigest",
    "ConditionalRequestConflict",
    "ExpiredToken",
    "IncompleteBody",
    "OperationAborted",
    "RequestTimeout",
    "SlowDown",
    "Throttling",
    "TooManyRequests",
    "XAmzContentSHA256Mismatch",
}
_PASSING_STATUSES = {408, 409, 425, 429}
_REMEDIES = {
    "AccessDenied": "grant these credentials access to this bucket and prefix",
    "AuthorizationHeaderMalformed": "set the bucket's region (storage.region or AWS_REGION)",
    "InvalidAccessKeyId": "use an access key that exists at this endpoint, or correct the endpoint",
    "InvalidToken": "use a session token that belongs to this access key",
    "InvalidTokenId": "use a session token that belongs to this access key",
    "InvalidBucketName": "correct the bucket's name in the storage URI",
    "NoSuchBucket": "create the bucket, or correct the storage URI or endpoint",
    "PermanentRedirect": "set the bucket's region (storage.region or AWS_REGION)",
    "RequestTimeTooSkewed": "set this machine's clock (NTP): it is more than 15 minutes off the server's",
    "SignatureDoesNotMatch": "correct the secret access key: it does not belong to this access key",
}
_WRONG_IDENTITY = {"InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "InvalidTokenId"}
_TLS = re.compile(r"InvalidCertificate|UnknownIssuer|CERTIFICATE_VERIFY_FAILED|InvalidContentType|WRONG_VERSION_NUMBER")


def error_code(text: str) -> str | None:
    """The S3 error code in a reply or in obstore's message, if any."""
    found = re.search(r"<Code>(\w+)</Code>", text)
    return found[1] if found else None


def classify_message(text: str, subject: str) -> Exception:
    """The exception for an obstore message (see `classify`)."""
    status = re.search(r"non-2xx status code: (\d{3})", text)
    if status:
        return classify(int(status[1]), text, subject)
    if "Received redirect" in text:
        return classify(301, "<Code>PermanentRedirect</Code>", subject)
    return classify_broken(text, subject)


def classify_broken(text: str, subject: str) -> Exception:
    """For a request without a reply: TLS that cannot work is the user's, anything else may pass."""
    if _TLS.search(text):
        return UserError(
            f"no trusted TLS connection for {subject}: {_TLS.findall(text)[0]}; "
            "give the CA with AWS_CA_BUNDLE (in a cluster: storage.caBundleConfigMapRef), "
            "or correct the endpoint's scheme"
        )
    found = re.search(r'message: "([^"]+)"|error: "([^"]+)"|kind: (Timeout)', text)
    first_line = text.split("\n", 1)[0]
    cause = next(g for g in found.groups() if g) if found else ""
    return Transient(f"{first_line} ({cause})" if cause else first_line, cause)


def classify(status: int, text: str, subject: str) -> Exception:
    """The exception for a reply with an error status: NotFound, Transient, AccessDenied, WrongIdentity or UserError."""
    code = error_code(text)
    got = f"{status} {code or ''}".strip()
    if status >= 500 and status != 501:
        return Transient(f"server answered {got}")
    if code in _PASSING_CODES or (code not in _REMEDIES and status in _PASSING_STATUSES):
        return Transient(f"server answered {got}")
    if status == 404 and code != "NoSuchBucket":
        return NotFound(subject)
    message = re.search(r"<Message>([^<]*)</Message>", text)
    detail = f" ({message[1]})" if message else ""
    remedy = _REMEDIES.get(code or "", "check endpoint, bucket and credentials")
    return _kind(status, code)(f"storage refused {subject}: server answered {got}{detail}; {remedy}")


def _kind(status: int, code: str | None) -> type[UserError]:
    if code in _WRONG_IDENTITY:
        return WrongIdentity
    return AccessDenied if status == 403 and code != "RequestTimeTooSkewed" else UserError
