"""Carry out a plan of `tba run`: lock, configuration, processes, live progress, closing summary, report.

lock directory -> write config -> [embedded server] -> supervisor.tick + screen, 5 times a second -> summary, report
"""

import fcntl
import json
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from tba.cli.exit import INTERRUPTED, TERMINATED, tell
from tba.cli.feed import Feed
from tba.cli.local_plan import Plan, check_files
from tba.cli.screen import Screen
from tba.cli.supervisor import Supervisor
from tba.cli.target import STORAGE_FILE, StorageTarget, open_address
from tba.cli.view import closing, merge
from tba.contracts.errors import UserError
from tba.contracts.runfile import read_run_file, write_config
from tba.report.history import History
from tba.report.summary import Summary, summarise
from tba.run_record import refuse_foreign

_TICK_SECONDS = 0.2
_ENDED = ("Complete", "Failed")


class LocalRun:
    """One call of `tba run`."""

    def __init__(self, planned: Plan, *, as_json: bool = False) -> None:
        self._plan = planned
        self._as_json = as_json
        self._failure: str | None = None
        # With --json standard output holds the result alone.
        self._console = Console(stderr=as_json, highlight=False)

    def run(self) -> int:
        """Until the run ends or is stopped; the exit code of interface.md §2."""
        directory = self._plan.directory
        with lock_directory(directory), self._fresh(), self._same_store(), self._storage() as (target, environment):
            os.environ.update(environment)
            write_config(self._plan.config_directory, self._plan.job, base_dir=str(self._plan.job_file.parent))
            self._say(self._plan.describe())
            with Feed(open_address(target), progress_port=free_port()) as feed:
                found = feed.first_look()
                self._refuse_other_runs(found)
                check_files(
                    self._plan.job,
                    begun=found.run is not None,
                    saved=found.latest is not None and found.latest.checkpoint is not None,
                )
                (directory / STORAGE_FILE).write_bytes(target.to_json())
                code = self._supervise(feed, environment)
                history = feed.refresh_now()
                if history.latest is None and not feed.problem:  # nothing began: the next call may say where it goes
                    (directory / STORAGE_FILE).unlink(missing_ok=True)
                return self._close(code, history)

    def _refuse_other_runs(self, found: History) -> None:
        """Before anything is started: a searcher of ours would add rows to a run that is not.

        Raises: UserError; StoreUnavailable, since a run that cannot be read can be anybody's.
        """
        if found.run is not None:
            refuse_foreign(
                found.run,
                read_run_file(self._plan.config_directory),
                adopt=self._plan.job.spec.storage.adopt,
            )

    def _supervise(self, feed: Feed, environment: dict[str, str]) -> int:
        trainer, searchers = self._plan.programs(port=feed.progress_port, environment=environment)
        before = feed.history
        if before.latest is not None:
            self._say(f"resumes: the store holds this run at step {before.latest.step} ({before.latest.state.value})")
            self._tell_new_prompts(before)
        with Screen(self._console) as screen:
            supervisor = Supervisor(
                trainer,
                searchers,
                policy=self._plan.restart_policy,
                checkpoint=lambda: feed.history.latest.checkpoint if feed.history.latest else None,
                notify=screen.tell,
            )
            with _stop_signals() as received:
                try:
                    return self._loop(supervisor, feed, screen, received)
                finally:
                    supervisor.kill()
                    if supervisor.message:
                        self._failure = supervisor.message

    def _tell_new_prompts(self, before: History) -> None:
        """A run keeps the prompts that it began with: whoever has changed their file is told so."""
        began = min((event.time for event in before.events), default=float("inf"))
        task = self._plan.job.spec.task
        for prompts in filter(None, (task.prompts, task.evaluation.prompts)):
            path = Path((prompts.uri or "").removeprefix("file://"))
            if path.is_file() and path.stat().st_mtime > began:
                self._say(
                    f"warning: {path} was written after this run began, which goes on with the prompts it began with: "
                    "for the new ones name another --storage and --run-dir"
                )

    def _loop(self, supervisor: Supervisor, feed: Feed, screen: Screen, received: list[int]) -> int:
        known: dict[str, int] = {}
        supervisor.start()
        while (code := supervisor.tick()) is None:
            while received:
                _stop(received.pop(0), supervisor, screen)
            if supervisor.pids != known:
                known = supervisor.pids
                (self._plan.directory / "processes.json").write_text(json.dumps(known))
            history = feed.history
            summary = self._as_seen_here(summarise(history, time.time()), feed, stopping=supervisor.stopping)
            screen.show(summary, history, processes=supervisor.restarts)
            time.sleep(_TICK_SECONDS)
        return code

    def _as_seen_here(self, summary: Summary, feed: Feed, *, stopping: bool) -> Summary:
        """We know more than the bucket: whether it can be read, and that a trainer that does not answer is starting."""
        summary = merge(summary, feed.progress)
        summary = replace(summary, total_steps=summary.total_steps or self._plan.job.spec.objective.total_steps)
        if feed.problem:
            return replace(summary, detail=f"stale, cannot read the run: {feed.problem}")
        if feed.progress is None and not stopping and summary.state not in _ENDED:
            detail = f"the trainer loads model and prompts, see {self._plan.directory / 'logs'}"
            return replace(summary, state="Starting", detail=detail)
        return summary

    def _close(self, code: int, history: History) -> int:
        summary = summarise(history, time.time())
        if code in (INTERRUPTED, TERMINATED) and summary.state not in _ENDED:
            summary = replace(summary, state="Stopped", detail="")
        self._say(closing(summary, history))
        report = self._write_report(history)
        if self._as_json:
            result: dict[str, Any] = summary.to_dict() | {"exitCode": code, "report": report and str(report)}
            sys.stdout.write(json.dumps(result) + "\n")
        if code in (INTERRUPTED, TERMINATED):
            self._say("stopped; the same command (without --fresh) resumes this run")
        elif self._failure:
            tell(self._failure)
        return code

    def _write_report(self, history: History) -> Path | None:
        try:
            from tba.report.page import render_report
        except ImportError as error:
            self._say(f"no report: {error.name} is not installed; pip install 'tba-operator[report]'")
            return None
        path = self._plan.directory / "report.html"
        try:
            path.write_text(render_report(history, now=time.time(), uri=self._plan.storage.uri), encoding="utf-8")
        except OSError as error:  # a full disk must not hide how the run ended
            self._say(f"no report: {error}; when that is mended: tba report {self._plan.directory}")
            return None
        self._say(f"report: {path}")
        return path

    @contextmanager
    def _fresh(self) -> Iterator[None]:
        """Clear the directory, whose lock is held, if the user said so; only files that `tba run` makes."""
        if self._plan.fresh:
            for name in ("store", "server", "spool", "logs", "config"):
                shutil.rmtree(self._plan.directory / name, ignore_errors=True)
            for name in ("report.html", STORAGE_FILE, "processes.json"):
                (self._plan.directory / name).unlink(missing_ok=True)
        yield

    @contextmanager
    def _same_store(self) -> Iterator[None]:
        """A directory stands for one run, wherever that is stored."""
        directory = self._plan.directory
        record = directory / STORAGE_FILE
        if record.is_file():
            before = StorageTarget.read(record)
            if (before.uri, before.credentials_file is not None) != (self._plan.storage.uri, self._plan.embedded):
                embedded = " (--storage embedded)" if before.credentials_file else ""
                raise UserError(
                    f"{directory} holds a run that is stored at {before.uri}{embedded}, got {self._plan.storage.uri}: "
                    "pass --storage as then to go on with it, --run-dir for another run, or --fresh to delete it"
                )
        yield

    @contextmanager
    def _storage(self) -> Iterator[tuple[StorageTarget, dict[str, str]]]:
        """The address of the run's store and the environment that reaches it."""
        if not self._plan.embedded:
            yield self._plan.storage, {}
            return
        from tba.store.serve import EmbeddedServer

        with EmbeddedServer(self._plan.directory / "server") as server:
            self._say(f"server started, pid {server.pid}, {server.endpoint}")
            target = self._plan.storage.model_copy(
                update={"endpoint": server.endpoint, "credentials_file": str(server.credentials_file)}
            )
            yield target, server.env

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)


@contextmanager
def lock_directory(directory: Path) -> Iterator[None]:
    """Hold the run directory. Raises: UserError if another `tba run` has it."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = (directory / "lock").open("a+")
    except OSError as error:
        raise UserError(f"the run directory cannot be written, got {error}: name another --run-dir") from error
    with lock as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.seek(0)
            raise UserError(
                f"{directory} is in use by another `tba run` (pid {file.read().strip() or 'unknown'}): "
                f"stop that one, or give this one its own --run-dir"
            ) from error
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def free_port() -> int:
    """A loopback port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """Signals received and not yet obeyed. The handler only notes them: a line may be half written just then."""
    received: list[int] = []

    def note(signum: int, _frame: Any) -> None:
        received.append(signum)

    before = {s: signal.signal(s, note) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _stop(signum: int, supervisor: Supervisor, screen: Screen) -> None:
    """Ctrl-C or SIGTERM asks for a clean stop; a second one kills."""
    if supervisor.stopping:
        screen.tell("killing what is left")
    else:
        screen.tell("stopping: the trainer writes a checkpoint; again to kill")
    supervisor.request_stop(INTERRUPTED if signum == signal.SIGINT else TERMINATED)
