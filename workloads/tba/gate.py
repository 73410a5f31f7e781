"""Whose turn it is on the device that a trainer and its colocated searcher share: one socket between the two.

```
  trainer: Gatekeeper                    searcher: Gate
     ◄──────────────── asleep 0 ─────────── its loop runs; it has no turn and has not touched the device
     ───── wake 1 ─────────────────────────►
     ◄──────────────── awake 1 ────────────
     ◄──────────────── starting 1 ───────── takes its first weights and starts its engine, which takes long
     ◄──────────────── awake 1 ──────────── generates
     ───── sleep 2 ────────────────────────►
     ◄──────────────── asleep 2 ─────────── nothing of it runs on the device, until a later wake
```
The searcher uses the device in a turn only, and a turn ends only when it says so: a trainer that has read `asleep N`
for its newest N is alone with the device, whatever the two did at the same time.
"""

import os
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from tba.parent import die_with_parent

PASS_SECONDS = 0.25
"""Between looks for rows and weights on both sides: one of the two always waits for the other."""
_READ_BYTES = 4096


class Gatekeeper:
    """The trainer's end. For one thread. The other process may be gone at any time: then nothing is answered."""

    def __init__(self) -> None:
        self._socket, self._theirs = socket.socketpair()
        self._socket.setblocking(False)
        self._received = b""
        self._number = 0
        self._gone = False
        self._given = False  # the newest command was a wake
        self._state, self._answered = "", -1

    @property
    def fd(self) -> int:
        """What the searcher is to inherit. Call `passed` when it has."""
        return self._theirs.fileno()

    def passed(self) -> None:
        """The searcher has its end now; ours of it is closed, so that its death closes the socket."""
        self._theirs.close()

    @property
    def state(self) -> str:
        """What the searcher said last: asleep, starting or awake; empty before anything."""
        return self._state

    def wake(self) -> None:
        """Give a turn, if the searcher can take one and has none."""
        self.read()
        if self._state == "asleep" and self._answered == self._number:
            self._command("wake")

    def take_turn(self) -> None:
        """Ask the searcher to end its turn, if it has one."""
        if self._given:
            self._command("sleep")

    def alone(self) -> bool:
        """Whether the searcher does nothing on the device until it is woken.

        One that has not said a word yet has no turn and has not touched the device.
        """
        self.read()
        return not self._state or (self._state == "asleep" and self._answered == self._number)

    def wait(self, seconds: float) -> None:
        """Until the searcher says something, at most so long."""
        if self._gone:
            time.sleep(seconds)
            return
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            selector.select(seconds)
        self.read()

    def read(self) -> None:
        """Take what the searcher has said."""
        with suppress(OSError):  # nothing there, or nobody
            while data := self._socket.recv(_READ_BYTES):
                self._received += data
            self._gone = True
        *lines, self._received = self._received.split(b"\n")
        for line in lines:
            state, _, number = line.decode().partition(" ")
            self._state, self._answered = state, int(number)

    def close(self) -> None:
        """A searcher that lives on sees it and ends."""
        self._socket.close()
        self._theirs.close()

    def _command(self, what: str) -> None:
        self._number += 1
        self._given = what == "wake"
        with suppress(OSError):  # it has ended
            self._socket.send(f"{what} {self._number}\n".encode())


class Gate:
    """The searcher's end: a thread reads it. `on_closed` is called in that thread when the trainer has gone."""

    def __init__(self, fd: int, *, on_closed: Callable[[], None]) -> None:
        self._socket = socket.socket(fileno=fd)
        self._socket.set_inheritable(False)  # no reward or engine process may keep it open
        self._on_closed = on_closed
        self._changed = threading.Condition()
        self._number = 0
        self._wanted = False
        self._told: tuple[str, int] | None = None
        threading.Thread(target=self._listen, name="gate", daemon=True).start()

    @property
    def open(self) -> bool:
        """Whether it is this process's turn."""
        with self._changed:
            return self._wanted

    def wait(self, seconds: float) -> None:
        """Until it may be this process's turn, at most so long."""
        with self._changed:
            self._changed.wait_for(lambda: self._wanted, seconds)

    def asleep(self) -> None:
        """Nothing runs on the device. Repeated for each command, told once."""
        with self._changed:
            if not self._wanted:
                self._tell("asleep")

    def awake(self) -> None:
        """The turn is taken."""
        self._tell_in_turn("awake")

    def starting(self) -> None:
        """The engine starts: this turn may be a long one."""
        self._tell_in_turn("starting")

    def _tell_in_turn(self, state: str) -> None:
        with self._changed:
            if self._wanted:
                self._tell(state)

    def _tell(self, state: str) -> None:
        if (state, self._number) != self._told:
            self._told = state, self._number
            with suppress(OSError):  # the listener finds out
                self._socket.sendall(f"{state} {self._number}\n".encode())

    def _listen(self) -> None:
        received = b""
        with suppress(OSError):
            while data := self._socket.recv(_READ_BYTES):
                *lines, received = (received + data).split(b"\n")
                for line in lines:
                    self._obey(line.decode())
        with self._changed:
            self._wanted = False
            self._socket.close()
        self._on_closed()

    def _obey(self, line: str) -> None:
        command, _, number = line.partition(" ")
        with self._changed:
            self._number, self._wanted = int(number), command == "wake"
            self._changed.notify_all()


def die_with_trainer(stop: Callable[[], None], *, grace_seconds: float) -> Callable[[], None]:
    """What to do when the trainer has gone: ask this process to `stop`, and kill it if it still lives after the grace.

    From now on the kernel sends SIGTERM too, when the thread that started this process ends.
    """
    die_with_parent()

    def leave() -> None:
        stop()
        time.sleep(grace_seconds)
        os.kill(os.getpid(), signal.SIGKILL)

    return leave
