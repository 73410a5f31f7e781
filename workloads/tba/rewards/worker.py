"""One worker slot of the reward pool: a process, the calls sent to it, and what to do when it misbehaves.

    STOPPED ── start_after reached ─► STARTING ── ready ─► READY ── crash, time-out, out of memory ─► STOPPED (backoff)

Only the first call sent is running; the rest wait in the pipe. When the process dies, the first one fails and the
rest go back to the pool.
"""

import contextlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum, auto
from selectors import EVENT_READ, EVENT_WRITE, BaseSelector
from typing import Any

from tba.contracts.records import Outcome
from tba.rewards import RewardSource
from tba.rewards.process import RewardProcess

START_SECONDS = 120.0
"""Limit on starting a process and importing the reward."""

_MAX_WINDOW_CALLS = 8
_WINDOW_SECONDS = 2e-3  # calls sent ahead are this much work: hides the round trip, hardly delays a call behind a hang
_WINDOW_BYTES = 1 << 18
_LOOK_SECONDS = 0.1  # how soon an ended process is noticed although a process it forked holds its socket open
_ENDING_SECONDS = 0.002  # between looks at a process that is about to end
_FIRST_BACKOFF_SECONDS = 0.05
_MAX_BACKOFF_SECONDS = 2.0
_FORGED = "the reward wrote to the pool's own socket"


@dataclass(slots=True, eq=False)
class PendingCall:
    """A call with its future; `payload` is the JSON array [prompt, response, answer] without its first bracket."""

    payload: bytes
    future: "Future[Any]"


class State(Enum):
    """Of a worker's process."""

    STOPPED = auto()
    STARTING = auto()
    READY = auto()


Settle = Callable[[PendingCall, Outcome, float | None, str, str], None]
"""settle(call, outcome, reward, reason, error) ends a call."""


class Worker:
    """State machine of one process. Driven by the pool's thread alone; times are seconds of one monotonic clock."""

    def __init__(
        self,
        source: RewardSource,
        *,
        selector: BaseSelector,
        settle: Settle,
        requeue: Callable[[list[PendingCall]], None],
    ) -> None:
        self.state = State.STOPPED
        self.process: RewardProcess | None = None
        self.in_flight: deque[PendingCall] = deque()
        self.start_after = float("inf")
        self.source_hash: str | None = None
        self.start_failures = 0  # in a row
        self.start_error = ""
        self.refused = False  # the last start failed because loading the reward raised: the same again every time
        self.killed: list[RewardProcess] = []  # dying, to be reaped
        self._source = source
        self._selector = selector
        self._settle = settle
        self._requeue = requeue
        self._deaths = 0  # since the last call that ended well
        self._since = 0.0  # when the start, or the running call, began
        self._looked_at = 0.0  # when `ended` was last asked
        self._reaped_at = 0.0  # when killed processes were last asked after
        self._next_id = 0
        self._first_id = 0  # of the running call
        self._bytes = 0
        self._mean_seconds = 1.0

    def has_room(self) -> bool:
        """Whether one more call may be sent."""
        if self.state is not State.READY:
            return False
        window = min(_MAX_WINDOW_CALLS, int(_WINDOW_SECONDS / self._mean_seconds))
        return not self.in_flight or (len(self.in_flight) < window and self._bytes < _WINDOW_BYTES)

    def start(self, now: float, memory_bytes: int) -> None:
        """Start a process and have it load the reward."""
        self.start_after = float("inf")
        self._since = now
        try:
            self.process = RewardProcess(self._source, memory_bytes)
        except OSError as error:  # no memory or no process slots for now
            self._start_failed(now, f"cannot start a process: {error}")
            return
        self.state = State.STARTING
        self._selector.register(self.process.socket, EVENT_READ, self)
        self._selector.register(self.process.output, EVENT_READ, self)
        self.flush()

    def send(self, call: PendingCall, now: float) -> None:
        """Queue a call for the process; `flush` writes it."""
        assert self.process is not None
        if not self.in_flight:
            self._since = now
        self.in_flight.append(call)
        self._bytes += len(call.payload)
        self.process.send(b"[%d," % self._next_id + call.payload)
        self._next_id += 1

    def flush(self) -> None:
        """Write what the socket takes, and ask to be woken for the rest."""
        process = self.process
        if process is None or process.closed:
            return
        events = EVENT_READ if process.flush() else EVENT_READ | EVENT_WRITE
        if self._selector.get_key(process.socket).events != events:
            self._selector.modify(process.socket, events, self)

    def readable(self, fd: int, now: float) -> None:
        """Handle what has arrived on one of the process's files."""
        process = self.process
        if process is None:  # killed since the selector reported it
            return
        if fd != process.output:
            self.receive(now)
            return
        process.drain_output()
        if process.output_closed:
            self._selector.unregister(process.output)

    def receive(self, now: float) -> None:
        """Handle the replies that have arrived."""
        process = self.process
        if process is None or process.closed:
            return
        try:
            messages = process.receive()
        except (ValueError, RecursionError):
            self._die(now, "crash", _FORGED)
            return
        if process.closed:
            self._selector.unregister(process.socket)
            process.kill_group()  # it is ending, or has closed our socket
        if self.state is State.STARTING and messages:
            self._started(messages.pop(0), now)
        if not messages or self.state is not State.READY:
            return
        seconds = (now - self._since) / len(messages)
        self._mean_seconds = max(1e-7, self._mean_seconds + 0.3 * (seconds - self._mean_seconds))
        self._since = now
        for message in messages:
            if not self._is_reply(message):
                self._die(now, "crash", _FORGED)
                return
            if not self._reply(message):
                self._stop(now)
                return

    def check(self, now: float, timeout_seconds: float) -> None:
        """Handle an ended process and an exceeded limit."""
        if self.killed:
            self.reap(0.0)
            self._reaped_at = now
        if self.process is not None and self._has_ended(now):
            self.receive(now)  # what it wrote before it ended
            if self.process is not None:
                self._die(now, "crash", self.process.describe_end())
        elif now >= self.deadline(timeout_seconds):
            self.receive(now)  # it may have answered while we were busy
            if now >= self.deadline(timeout_seconds):
                self._exceeded(now, timeout_seconds)

    def next_check(self, timeout_seconds: float) -> float:
        """When `check` has something to look at; infinity if only a reply can change anything."""
        first = min(self.deadline(timeout_seconds), self.start_after)
        if self.killed:
            first = min(first, self._reaped_at + _ENDING_SECONDS)
        if self.process is not None and self.process.closed:
            first = min(first, self._looked_at + _ENDING_SECONDS)
        if self.in_flight or self.state is State.STARTING:
            return min(first, self._looked_at + _LOOK_SECONDS)
        return first

    def deadline(self, timeout_seconds: float) -> float:
        """When the running call, or the start, must be over; infinity if nothing runs."""
        if self.state is State.STARTING:
            return self._since + START_SECONDS
        return self._since + timeout_seconds if self.in_flight else float("inf")

    def kill(self) -> None:
        """Kill the process now; calls in flight stay ours."""
        process, self.process = self.process, None
        if process is not None:
            # Their ends may have been seen by a drain outside of the selector: what stays registered would clash with
            # the next process, which gets the same descriptors.
            for file in (process.socket, process.output):
                with contextlib.suppress(KeyError):
                    self._selector.unregister(file)
            process.kill()
            self.killed.append(process)
        self.state = State.STOPPED

    def reap(self, timeout_seconds: float) -> None:
        """Wait for killed processes to be gone."""
        self.killed = [process for process in self.killed if not process.reap(timeout_seconds)]

    def _has_ended(self, now: float) -> bool:
        assert self.process is not None
        if not self.process.closed and now < self._looked_at + _LOOK_SECONDS:
            return False
        self._looked_at = now
        return self.process.ended()

    def _exceeded(self, now: float, timeout_seconds: float) -> None:
        if self.state is State.STARTING:
            self._start_failed(now, f"importing it took longer than {START_SECONDS:g} s")
        else:
            self._die(now, "timeout", f"no reward within {timeout_seconds:g} s (task.reward.timeoutSeconds)")

    def _started(self, message: Any, now: float) -> None:
        if not isinstance(message, dict):
            self._start_failed(now, _FORGED)
        elif "ready" not in message:
            self._start_failed(now, str(message.get("failed", _FORGED)), refused="failed" in message)
        elif self.source_hash not in (None, message["ready"]):
            self._start_failed(now, "its source file changed while the job runs")
        else:
            self.source_hash = message["ready"]
            self.start_failures = 0
            self.state = State.READY
            self._first_id = self._next_id

    def _start_failed(self, now: float, error: str, *, refused: bool = False) -> None:
        self.start_failures += 1
        self.start_error, self.refused = error, refused
        self._stop(now)

    def _is_reply(self, message: Any) -> bool:
        if not self.in_flight or not isinstance(message, list) or message[:1] != [self._first_id]:
            return False
        match message[1:]:
            case [int() | float()] | [None, str(), str()]:
                return True
        return False

    def _reply(self, message: list[Any]) -> bool:
        """Settle the running call. Returns whether the process may go on."""
        call = self._pop()
        if message[1] is not None:
            self._settle(call, Outcome.SCORED, message[1], "", "")
        else:
            self._settle(call, Outcome.FAILED, None, message[2], message[3])
            if message[2] == "memory":  # what the reward hoards would fail every later call too
                return False
        self._deaths = 0
        return True

    def _pop(self) -> PendingCall:
        call = self.in_flight.popleft()
        self._bytes -= len(call.payload)
        self._first_id += 1
        return call

    def _die(self, now: float, reason: str, error: str) -> None:
        if self.state is State.STARTING:
            self._start_failed(now, error)
            return
        if self.in_flight:
            outcome = Outcome.TIMED_OUT if reason == "timeout" else Outcome.FAILED
            self._settle(self._pop(), outcome, None, reason, error)
        self._stop(now)

    def _stop(self, now: float) -> None:
        self.kill()
        waiting = list(self.in_flight)
        self.in_flight.clear()
        self._bytes = 0
        self._requeue(waiting)
        self._deaths += 1
        doublings = min(self._deaths - 2, 16)
        backoff = 0.0 if doublings < 0 else min(_MAX_BACKOFF_SECONDS, _FIRST_BACKOFF_SECONDS * 2.0**doublings)
        self.start_after = now + backoff
