"""Which S3 endpoint, and as whom: URI, endpoint, region, addressing style and the credential chain.

Names and order are boto3's: argument, then AWS_ENDPOINT_URL_S3 / AWS_ENDPOINT_URL, AWS_REGION /
AWS_DEFAULT_REGION, AWS_CA_BUNDLE. Keys come from the files of TBA_CREDENTIALS_DIR (a mounted Secret); else those in the
environment are used as they are; else boto3's chain (profile, web identity, container, instance metadata), which renews
what expires.
"""

import ipaddress
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, urlsplit

from obstore.exceptions import BaseError
from obstore.store import S3Store as ObstoreS3

from tba.contracts.errors import UserError
from tba.store.key_files import KEY, SECRET, KeyFiles
from tba.store.protocol import check_key
from tba.store.retry import RetryPolicy, Rotation

if TYPE_CHECKING:
    from obstore.store import S3Credential

CredentialProvider = Callable[[], "S3Credential"]
# Boto renews a credential 10 minutes before it ends, so asking it this often never hands out a dead one.
_CREDENTIAL_TTL = timedelta(minutes=5)
_FIRST_SECONDS = 20.0
"""New keys take some seconds until every server of a store knows them."""
_LATER_SECONDS = 300.0
"""A kubelet takes up to 90 s to project a changed Secret."""
_HOST = re.compile(r"[A-Za-z0-9._-]+")
"""A bucket, or the host of an endpoint. Given another the client does not raise but panics, amid a request."""
_CREDENTIAL_REMEDY = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile, or run under a role that has access"


@dataclass(frozen=True, slots=True)
class KeySource:
    """Where keys come from. Call it for those of now."""

    provider: CredentialProvider
    rotation: Rotation = Rotation()
    """How long the server may not know them."""

    def __call__(self) -> "S3Credential":
        """The keys of now."""
        return self.provider()


@dataclass(frozen=True, slots=True)
class S3Location:
    """Where one run's objects live."""

    bucket: str
    root: str
    """Key prefix without slashes at its ends; may be empty."""
    endpoint: str | None
    region: str
    path_style: bool
    ca_bundle: str | None
    """PEM text rather than its path, so that a changed file is another location."""

    @property
    def uri(self) -> str:
        """`s3://bucket/root`."""
        return f"s3://{self.bucket}/{self.root}".rstrip("/")

    def path(self, key: str) -> str:
        """The key within the bucket."""
        return f"{self.root}/{check_key(key)}" if self.root else check_key(key)


def locate(
    uri: str,
    *,
    endpoint: str | None,
    region: str | None,
    force_path_style: bool | None,
    ca_bundle: Path | None,
    environ: Mapping[str, str],
) -> S3Location:
    """Resolve an `s3://` URI. Raises: UserError for a malformed URI or endpoint or an unreadable CA file."""
    parts = _split(uri)
    if parts is None or not _HOST.fullmatch(parts.netloc) or parts.query or parts.fragment:
        raise UserError(f"storage URI must look like s3://bucket/prefix, got {uri!r}")
    root = parts.path.strip("/")
    if root:
        try:
            check_key(root)
        except ValueError as error:
            raise UserError(f"storage URI {uri!r} must have a well-formed prefix: {error}; got {root!r}") from error
    endpoint = endpoint or environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL") or None
    if endpoint and not _is_endpoint(endpoint):
        raise UserError(f"storage endpoint must look like https://host or http://host:port, got {endpoint!r}")
    bundle = ca_bundle or (Path(environ["AWS_CA_BUNDLE"]) if environ.get("AWS_CA_BUNDLE") else None)
    return S3Location(
        bucket=parts.netloc,
        root=root,
        endpoint=endpoint.rstrip("/") if endpoint else None,
        region=region or environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION") or "us-east-1",
        path_style=force_path_style if force_path_style is not None else endpoint is not None,
        ca_bundle=_pem(bundle) if bundle else None,
    )


def _is_endpoint(url: str) -> bool:
    parts = _split(url)
    if parts is None or parts.scheme not in ("http", "https") or not parts.hostname:
        return False
    if ":" in parts.hostname or parts.hostname.rpartition(".")[2].isdigit():
        return _is_ip_address(parts.hostname)
    return _HOST.fullmatch(parts.hostname) is not None


def _split(url: str) -> SplitResult | None:
    """Null for what is no URL: brackets without an IPv6 address, a port that is no number."""
    try:
        parts = urlsplit(url)
        return parts if parts.port is None or parts.port else None
    except ValueError:
        return None


def _is_ip_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _pem(bundle: Path) -> str:
    try:
        return bundle.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no text"
        raise UserError(f"CA bundle {bundle} cannot be read: {reason}; give the path of a PEM file") from error


def find_credentials(environ: Mapping[str, str]) -> KeySource:
    """Raises: UserError if no source has any. Values are never part of a message."""
    folder = environ.get("TBA_CREDENTIALS_DIR")
    if folder:
        where = f"{KEY} and {SECRET} of the Secret that storage.credentials names, mounted at {folder}"
        return KeySource(KeyFiles(Path(folder)), Rotation(_FIRST_SECONDS, _LATER_SECONDS, where))
    key, secret = environ.get(KEY), environ.get(SECRET)
    if key and secret:
        return static_credentials(key, secret, environ.get("AWS_SESSION_TOKEN"))
    # Half a second of import that a process with keys in its environment does not need.
    from botocore.credentials import RefreshableCredentials
    from botocore.exceptions import BotoCoreError
    from obstore.auth.boto3 import Boto3CredentialProvider

    try:
        provider = Boto3CredentialProvider(ttl=_CREDENTIAL_TTL)
    except (BotoCoreError, ValueError) as error:
        raise UserError(f"no S3 credentials found ({error}); {_CREDENTIAL_REMEDY}") from error
    renewed = isinstance(provider.credentials, RefreshableCredentials)
    return KeySource(provider, Rotation(_FIRST_SECONDS, _LATER_SECONDS) if renewed else Rotation())


def static_credentials(key: str, secret: str, token: str | None = None) -> KeySource:
    """Keys that never change."""
    credential: S3Credential = {
        "access_key_id": key,
        "secret_access_key": secret,
        "token": token or None,
        "expires_at": None,
    }
    return KeySource(lambda: credential)


def connect(location: S3Location, keys: KeySource, policy: RetryPolicy) -> ObstoreS3:
    """An obstore client at the root of the bucket that never retries by itself; nothing is sent yet.

    Raises: UserError for a CA that is no certificate.
    """
    endpoint = location.endpoint
    if endpoint and not location.path_style:
        # obstore wants the bucket inside the endpoint when it is addressed by host name.
        parts = urlsplit(endpoint)
        endpoint = parts._replace(netloc=f"{location.bucket}.{parts.netloc}").geturl()
    # Our own retrier bounds and counts: obstore's must not multiply it.
    options = {
        "allow_http": bool(endpoint and endpoint.startswith("http://")),
        "connect_timeout": timedelta(seconds=policy.connect_timeout_seconds),
        "timeout": timedelta(seconds=policy.request_timeout_seconds),
    }
    if location.ca_bundle:
        options["root_certificate"] = location.ca_bundle.encode()
    # Both names: obstore reads AWS_ENDPOINT_URL_S3 itself and prefers it to `endpoint`.
    where = {"endpoint": endpoint, "aws_endpoint_url_s3": endpoint} if endpoint else {}
    try:
        return ObstoreS3(
            location.bucket,
            region=location.region,
            virtual_hosted_style_request=not location.path_style,
            credential_provider=keys.provider,
            client_options=options,  # pyright: ignore[reportArgumentType]
            retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=policy.request_timeout_seconds)},
            **where,  # pyright: ignore[reportArgumentType]
        )
    except (ValueError, BaseError) as error:
        if not location.ca_bundle:
            raise
        reason = str(error).split("\n", 1)[0]
        raise UserError(
            f"CA bundle for {location.uri} holds no certificate: {reason}; give PEM certificates"
        ) from error
