"""Reward code in killable processes: whatever it does costs its own sample only, and a failure is never a reward of 0.

    submit(call) ─► queue ─► pool thread ─► worker slots (worker.py) ─► child programs (child.py), one call at a time
       future  ◄── RewardResult ◄── reply, or: crash, time-out (SIGKILL, restart), out of memory, no number

A guard against mistakes and runaway code, not a security boundary: the code has the searcher's user and environment.
"""

import atexit
import json
import os
import selectors
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

from tba.contracts.config import ConfigMapRef, Reward
from tba.contracts.errors import UserError
from tba.contracts.records import Outcome
from tba.mounts import CONFIG_MAPS, config_map_file
from tba.rewards import RewardSource, check_name
from tba.rewards.orphans import reap_orphans
from tba.rewards.worker import PendingCall, State, Worker

_FAILED_STARTS = 3  # in a row, before waiting calls are failed
_REAP_SECONDS = 10.0
_ORPHANS_SECONDS = 5.0  # between looks for what reward code has left behind


@dataclass(frozen=True, slots=True)
class RewardCall:
    """One response to score."""

    prompt: str
    response: str
    answer: str | None


@dataclass(frozen=True, slots=True)
class RewardResult:
    """What became of a call. `reward` is None unless `outcome` is SCORED; `error` is a short text for people."""

    outcome: Outcome
    reward: float | None
    error: str = ""


class RewardPool:
    """Processes that score responses. Thread-safe. Close it.

    `failures` counts calls by reason: timeout, crash, exception, memory, invalid (no finite number), start (the reward
    could not be started again), closed. `restarts` counts processes started beyond the first of each worker.
    """

    def __init__(
        self,
        reward: Reward,
        *,
        num_workers: int,
        timeout_seconds: float | None = None,
        memory_bytes: int | None = None,
        search_path: Path | None = None,
        code: str | None = None,
    ) -> None:
        """Start the processes and wait until the first has loaded the reward. Limits default to `reward`'s.

        `search_path` and `code`: see `reward_source`.

        Raises:
            UserError: loading the reward raised.
            RuntimeError: its process could not be started, ended or took too long, which may pass.
        """
        if num_workers < 1:
            raise ValueError(f"num_workers must be at least 1, got {num_workers}")
        source = reward_source(reward, search_path, code)
        self.failures: Counter[str] = Counter()
        self.restarts = 0
        self._limits = _Limits(timeout_seconds or reward.timeout_seconds, memory_bytes or reward.memory_bytes)
        self._queue: deque[PendingCall] = deque()
        self._lock = threading.Lock()
        self._closing = False
        self._orphans_at = time.monotonic()
        self._selector = selectors.DefaultSelector()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector.register(self._wake_fd, selectors.EVENT_READ)
        self._awake = self._stopped = False
        self._source = source
        self._num_workers = num_workers
        self._leaving: list[Worker] = []  # killed by `resize`, to be reaped
        self._workers = [self._new_worker() for _ in range(num_workers)]
        self._first_start: Future[str] = Future()
        self._thread = threading.Thread(target=self._run, name="reward-pool", daemon=True)
        self._thread.start()
        atexit.register(self.close)
        try:
            source_hash = self._first_start.result()
        except BaseException:
            self.close()
            raise
        self.version = f"{source.label}@{source_hash}"
        """Names the reward in shards: its label and a hash of its source file and parameters."""

    def submit(self, call: RewardCall) -> "Future[RewardResult]":
        """Queue a call. The future always gets a RewardResult, and cannot be cancelled.

        Raises:
            RuntimeError: the pool is closed.
        """
        pending = PendingCall(json.dumps([call.prompt, call.response, call.answer]).encode()[1:], Future())
        pending.future.set_running_or_notify_cancel()
        with self._lock:
            if self._closing:
                raise RuntimeError("the reward pool is closed")
            self._queue.append(pending)
            self._wake()
        return pending.future

    def score(self, calls: Iterable[RewardCall]) -> list[RewardResult]:
        """Score calls and wait for all; results in their order."""
        return [future.result() for future in [self.submit(call) for call in calls]]

    def set_limits(self, timeout_seconds: float, memory_bytes: int) -> None:
        """Change the limits of one call's seconds and of a process's address space, running calls included."""
        with self._lock:
            self._limits = _Limits(timeout_seconds, memory_bytes)
            self._wake()

    def resize(self, num_workers: int) -> None:
        """Have so many processes, at least 1. Calls that run in one too many start again in another."""
        if num_workers < 1:
            raise ValueError(f"num_workers must be at least 1, got {num_workers}")
        with self._lock:
            self._num_workers = num_workers
            self._wake()

    def process_ids(self) -> list[int]:
        """Return the ids of the live reward processes."""
        processes = [worker.process for worker in self._workers]
        return [process.pid for process in processes if process is not None]

    def close(self) -> None:
        """Kill and reap all processes; calls not yet scored end as failed. May be called twice."""
        with self._lock:
            self._closing = True
            self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()
            atexit.unregister(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _wake(self) -> None:
        if not self._awake and not self._stopped:
            self._awake = True
            os.eventfd_write(self._wake_fd, 1)

    # Below: the pool's own thread only.

    def _run(self) -> None:
        try:
            self._workers[0].start_after = 0.0
            memory_bytes = self._limits.memory_bytes
            while not self._closing:
                limits = self._limits
                if limits.memory_bytes != memory_bytes:
                    memory_bytes = limits.memory_bytes
                    self._apply_memory(memory_bytes)
                self._check_workers(limits)
                self._fit_workers()
                self._dispatch()
                self._wait(limits.timeout_seconds)
        finally:  # also after a bug: no caller may wait for ever, no process may stay
            self._shut_down()

    def _check_workers(self, limits: "_Limits") -> None:
        now = time.monotonic()
        if now - self._orphans_at >= _ORPHANS_SECONDS:
            self._orphans_at = now
            reap_orphans()
        for worker in self._workers + self._leaving:
            worker.check(now, limits.timeout_seconds)
            if worker.start_after <= now:
                self.restarts += worker.source_hash is not None
                worker.start(now, limits.memory_bytes)
        if not self._first_start.done():
            self._check_first_start(now)
        elif self._queue and not any(worker.state is State.READY for worker in self._workers):
            self._fail_if_hopeless()

    def _new_worker(self) -> Worker:
        return Worker(self._source, selector=self._selector, settle=self._settle, requeue=self._requeue)

    def _fit_workers(self) -> None:
        """Once the reward is known to load: more of them, or the last ones go."""
        if not self._first_start.done():
            return
        while len(self._workers) < self._num_workers:
            worker = self._new_worker()
            worker.start(time.monotonic(), self._limits.memory_bytes)
            self._workers.append(worker)
        while len(self._workers) > self._num_workers:
            worker = self._workers.pop()
            worker.kill()
            worker.start_after = float("inf")  # it may have been about to start again, and nobody would look after it
            self._requeue(list(worker.in_flight))
            worker.in_flight.clear()
            self._leaving.append(worker)
        self._leaving = [worker for worker in self._leaving if worker.killed]

    def _check_first_start(self, now: float) -> None:
        first = self._workers[0]
        if first.source_hash is not None:
            for worker in self._workers[1:]:
                worker.start_after = now
            self._first_start.set_result(first.source_hash)
        elif first.start_failures:
            kind = UserError if first.refused else RuntimeError
            self._first_start.set_exception(kind(f"The reward cannot be loaded: {first.start_error}"))
            self._closing = True

    def _fail_if_hopeless(self) -> None:
        hopeless = [worker for worker in self._workers if worker.start_failures >= _FAILED_STARTS]
        while hopeless and self._queue:
            error = f"the reward cannot be started again: {hopeless[0].start_error}"
            self._settle(self._queue.popleft(), Outcome.FAILED, None, "start", error)

    def _dispatch(self) -> None:
        now = time.monotonic()
        while self._queue:
            free = [worker for worker in self._workers if worker.has_room()]
            if not free:
                break
            min(free, key=lambda worker: len(worker.in_flight)).send(self._queue.popleft(), now)
        for worker in self._workers:
            worker.flush()

    def _wait(self, timeout_seconds: float) -> None:
        """Sleep until something happens, then handle what the processes sent."""
        first = min(worker.next_check(timeout_seconds) for worker in self._workers + self._leaving)
        seconds = None if first == float("inf") else max(0.0, first - time.monotonic())
        for key, _ in self._selector.select(seconds):
            worker: Worker | None = key.data
            if worker is not None:
                worker.readable(key.fd, time.monotonic())
                continue
            os.eventfd_read(self._wake_fd)
            with self._lock:
                self._awake = False

    def _apply_memory(self, memory_bytes: int) -> None:
        for worker in self._workers:
            if worker.process is not None:
                worker.process.set_memory(memory_bytes)

    def _settle(self, call: PendingCall, outcome: Outcome, reward: float | None, reason: str, error: str) -> None:
        if reason:
            self.failures[reason] += 1
        call.future.set_result(RewardResult(outcome, reward, error))

    def _requeue(self, calls: list[PendingCall]) -> None:
        self._queue.extendleft(reversed(calls))

    def _shut_down(self) -> None:
        with self._lock:
            self._closing = self._stopped = True
        for worker in self._workers:
            worker.kill()
        end = time.monotonic() + _REAP_SECONDS
        for worker in self._workers + self._leaving:
            worker.reap(max(0.0, end - time.monotonic()))
        for worker in self._workers:
            self._requeue(list(worker.in_flight))
        reap_orphans()
        while self._queue:
            self._settle(self._queue.popleft(), Outcome.FAILED, None, "closed", "the reward pool was closed")
        self._selector.close()
        os.close(self._wake_fd)
        if not self._first_start.done():
            self._first_start.set_exception(RuntimeError("the reward pool was closed before its reward was loaded"))


class _Limits(NamedTuple):
    timeout_seconds: float
    memory_bytes: int


def reward_source(reward: Reward, search_path: Path | None, code: str | None = None) -> RewardSource:
    """Say where a configured reward comes from; reads the file of a ConfigMap reward unless its `code` is given.

    The file is the mounted ConfigMap's in a cluster, elsewhere `search_path/NAME/KEY` or `search_path/KEY`.

    Raises:
        UserError: that file cannot be read, or no built-in reward has the name.
    """
    path = None if search_path is None else str(search_path.resolve())
    if reward.name is not None:
        check_name(reward.name)
        return RewardSource("name", reward.name, search_path=path, parameters=reward.parameters)
    if reward.entrypoint is not None:
        return RewardSource("entrypoint", reward.entrypoint, search_path=path, parameters=reward.parameters)
    assert reward.config_map_ref is not None  # exactly one of the three, by its validator
    file = None if code is not None else _config_map_file(reward.config_map_ref, search_path or Path())
    text = code if file is None else _read_text(file)
    target = str(file or reward.config_map_ref.key)
    return RewardSource("file", target, text=text, search_path=path, parameters=reward.parameters)


def _config_map_file(reference: ConfigMapRef, base: Path) -> Path:
    if os.environ.get(CONFIG_MAPS):
        return config_map_file(reference, "task.reward")
    tried = [base / reference.name / reference.key, base / reference.key]
    for file in tried:
        if file.is_file():
            return file
    raise UserError(
        f"task.reward.configMapRef {reference.name}/{reference.key}: there is no file {' or '.join(map(str, tried))}. "
        "Put the Python file there, or set task.reward.entrypoint."
    )


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the reward file {file} cannot be read: {error}. It must be UTF-8 Python.") from error
