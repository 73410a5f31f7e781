"""`tba render`, and the kubectl plugin: `kubectl tba` is `tba` with status, watch and logs of a job in a cluster.

Reads the cluster through `kubectl` itself, so that contexts and logins of any kind work.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
import yaml
from pydantic import ValidationError

from tba import __version__
from tba.cli import app
from tba.cli.exit import exit_code
from tba.cli.jobfile import read_yaml
from tba.contracts.errors import StoreUnavailable, UserError
from tba.contracts.explain import explain
from tba.contracts.job import TBAJob
from tba_operator.api import GROUP, JOB_LABEL, PLURAL, ROLE_LABEL, Condition, Images, Job, parse_job, parse_status
from tba_operator.manifests import all_children
from tba_operator.world import Settings

_NUM_EVENTS = 8
_OUTAGE_SECONDS = 120.0
_AGAIN_SECONDS = 2.0
_ANY_POD = ("--ignore-errors", "--max-log-requests=10000")
"""kubectl leaves a selection at its first pod that has no log yet, and follows none of more than 5 pods."""
_REGISTRY = "ghcr.io/tba-operator"
"""As in the chart's values."""

Name = Annotated[str, typer.Argument(help="Name of a TBAJob.")]
Namespace = Annotated[str | None, typer.Option("--namespace", "-n", help="Default: the context's.")]
Context = Annotated[str | None, typer.Option(help="Of the kubeconfig; default the current one.")]


def render(
    file: Annotated[Path, typer.Argument(help="Job file (YAML).")],
    namespace: Annotated[str | None, typer.Option("--namespace", "-n", help="Default: the job file's.")] = None,
    output: Annotated[Literal["yaml", "json"], typer.Option("--output", "-o", help="yaml or json.")] = "yaml",
    trainer_image: Annotated[
        str, typer.Option(help="Of a job that names none; as in the operator's chart.")
    ] = f"{_REGISTRY}/tba-trainer:{__version__}",
    searcher_image: Annotated[
        str, typer.Option(help="Of a job that names none; as in the operator's chart.")
    ] = f"{_REGISTRY}/tba-searcher:{__version__}",
) -> None:
    """Print the objects that the operator makes of a job, without a cluster; owner references are left out."""
    job = _read_job(file, namespace)
    images = Images(trainer=trainer_image, searcher=searcher_image)
    children = all_children(job, Settings(), images)
    if job.queue:
        told = "is admitted a Kueue Workload, whose priority is the cluster's to say"
        typer.echo(f"queue {job.queue}: the operator makes pods only when it {told}", err=True)
    if output == "json":
        typer.echo(json.dumps({"apiVersion": "v1", "kind": "List", "items": children}, indent=2))
    else:
        typer.echo(yaml.safe_dump_all(children, sort_keys=False, width=sys.maxsize), nl=False)


def kubectl_tba(arguments: list[str] | None = None) -> None:
    """Entry point of the plugin: parse, run, exit with the code of interface.md §2."""
    command: Any = typer.main.get_command(app)
    command.commands |= typer.main.get_command(_cluster).commands  # type: ignore[attr-defined]
    sys.exit(exit_code(lambda: command.main(args=arguments, prog_name="kubectl tba", standalone_mode=False)))


_cluster = typer.Typer()


@_cluster.command("status")
def _status(name: Name, namespace: Namespace = None, context: Context = None) -> None:
    """Show phase, progress, conditions and the last events of a job in the cluster."""
    kubectl = _Kubectl(namespace, context)
    typer.echo(describe(kubectl.job(name), kubectl.events(name)))


@_cluster.command("watch")
def _watch(
    name: Name,
    namespace: Namespace = None,
    context: Context = None,
    interval: Annotated[float, typer.Option(min=0, help="Seconds between looks at the job.")] = 5.0,
) -> int:
    """Follow a job in the cluster until it ends; 0 if it is Complete, 1 if it Failed."""
    kubectl = _Kubectl(namespace, context)
    manifest, last = kubectl.job(name), ""
    while True:
        status = parse_status(manifest.get("status") or {})
        line = f"{name}: {_headline(manifest)}"
        if line != last:
            typer.echo(line)
            last = line
        if status.is_true("Complete") or status.is_true("Failed"):
            return 0 if status.is_true("Complete") else 1
        time.sleep(interval)
        manifest = _once_more(lambda: kubectl.job(name))


def _once_more(read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What was read before, read again: an API server that has answered once restarts and comes back.

    Raises: UserError; StoreUnavailable if it does not.
    """
    give_up = time.monotonic() + _OUTAGE_SECONDS
    while True:
        try:
            return read()
        except StoreUnavailable:
            if time.monotonic() >= give_up:
                raise
            time.sleep(_AGAIN_SECONDS)


@_cluster.command("logs")
def _logs(
    name: Name,
    namespace: Namespace = None,
    context: Context = None,
    role: Annotated[Literal["trainer", "searcher"], typer.Option(help="trainer or searcher.")] = "trainer",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Until Ctrl-C.")] = False,
) -> int:
    """Print the logs of a job's pods."""
    selector = f"{JOB_LABEL}={name},{ROLE_LABEL}={role}"
    wanted = ["logs", "--selector", selector, "--prefix", "--tail=-1", "--container", role, *_ANY_POD]
    return _Kubectl(namespace, context).pass_through([*wanted, *(["--follow"] if follow else [])])


def describe(manifest: dict[str, Any], events: list[dict[str, Any]]) -> str:
    """A job for people: what it does, what is wrong, where its run lies."""
    status = parse_status(manifest.get("status") or {})
    metadata, storage = manifest["metadata"], manifest["spec"]["storage"]["uri"]
    lines = [
        f"{metadata.get('namespace', 'default')}/{metadata['name']}: {_headline(manifest)}",
        f"storage: {storage} (`tba report {storage}` and other verbs of `tba` read it)",
        *map(_condition_line, status.conditions),
        *map(_event_line, sorted(events, key=_event_time)[-_NUM_EVENTS:]),
    ]
    return "\n".join(lines)


def _headline(manifest: dict[str, Any]) -> str:
    status = parse_status(manifest.get("status") or {})
    if status.phase is None:
        return "no status yet: does the operator run, and does it watch this namespace?"
    searchers = status.searcher
    parts = [status.phase]
    if progress := status.progress:
        parts.append(f"step {progress.step}/{progress.total_steps}")
        parts += [
            f"{label} {value:{form}}"
            for label, value, form in (
                ("reward", progress.reward, ".3f"),
                ("eval", progress.eval_score, ".3f"),
                ("staleness", progress.staleness_mean, ".1f"),
                ("idle %", progress.trainer_idle_percent, ".0f"),
            )
            if value is not None
        ]
    parts.append(f"searchers {searchers.ready_replicas}/{searchers.desired_replicas}")
    degraded = status.condition("Degraded")
    if degraded and degraded.status == "True":
        parts.append(degraded.reason)
    return " · ".join(parts)


def _condition_line(condition: Condition) -> str:
    told = f": {condition.message}" if condition.message else ""
    return f"  {condition.type}={condition.status} {condition.reason}{told} (since {condition.last_transition_time})"


def _event_line(event: dict[str, Any]) -> str:
    return f"  {_event_time(event)} {event.get('type', '')} {event.get('reason', '')}: {event.get('message', '')}"


def _event_time(event: dict[str, Any]) -> str:
    series = event.get("series") or {}
    times = (series.get("lastObservedTime"), event.get("lastTimestamp"), event.get("eventTime"))
    return next((time for time in times if time), "")


def _read_job(file: Path, namespace: str | None) -> Job:
    """As the API server would hand it out. Raises: UserError naming line or field, got and remedy."""
    data = read_yaml(file)
    if not isinstance(data, dict):
        raise UserError(f"{file}: a job file must be a mapping, got {type(data).__name__}: start with apiVersion")
    try:
        job = TBAJob.model_validate(data)
    except ValidationError as error:
        raise explain(error, str(file)) from error
    metadata = {**data["metadata"], "namespace": namespace or job.metadata.namespace}
    return parse_job({**data, "metadata": metadata})


class _Kubectl:
    """The command line of the cluster; it knows how to log in."""

    def __init__(self, namespace: str | None, context: str | None) -> None:
        options = {"--namespace": namespace, "--context": context}
        self._options = [word for name, value in options.items() if value for word in (name, value)]

    def job(self, name: str) -> dict[str, Any]:
        return self._read(["get", f"{PLURAL}.{GROUP}", name])

    def events(self, name: str) -> list[dict[str, Any]]:
        about = f"involvedObject.kind=TBAJob,involvedObject.name={name}"
        return self._read(["get", "events", "--field-selector", about])["items"]

    def pass_through(self, arguments: list[str]) -> int:
        return self._run(arguments, capture=False).returncode

    def _read(self, arguments: list[str]) -> dict[str, Any]:
        done = self._run([*arguments, "--output", "json"], capture=True)
        if done.returncode == 0:
            return json.loads(done.stdout)
        told = (done.stderr.strip().splitlines() or [f"kubectl ended with {done.returncode}"])[-1]  # before it: retries
        if "Error from server" in told or "doesn't have a resource type" in told:
            raise UserError(f"{told}. Check name and --namespace, and that the operator is installed")
        raise StoreUnavailable(f"{told}. Check that `kubectl get {PLURAL}` works")

    def _run(self, arguments: list[str], *, capture: bool) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(
                ["kubectl", *arguments, *self._options], capture_output=capture, text=True, check=False
            )
        except FileNotFoundError as error:
            raise UserError("kubectl: not found on PATH; install it, or run `tba` on the storage URI") from error
