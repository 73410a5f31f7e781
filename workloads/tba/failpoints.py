"""Named points where a test may kill this process: `TBA_FAILPOINTS="commit.before_cas=kill:3,upload.after_put=raise"`.

Each entry is `name=action[:nth]`: at the nth passage (default the first) `kill` sends SIGKILL to this process, `exit`
leaves at once with status 1, `raise` raises `Failpoint`. Unset, a passage costs one truth test of an empty dict.
"""

import os
import signal
import threading
from dataclasses import dataclass
from typing import NoReturn

VARIABLE = "TBA_FAILPOINTS"
_ACTIONS = ("kill", "exit", "raise")


class Failpoint(RuntimeError):
    """Raised by `name=raise`. Nothing catches it but a process's top, so it ends the process like a bug."""


@dataclass(slots=True)
class _Armed:
    action: str
    remaining: int


_armed: dict[str, _Armed] = {}
_lock = threading.Lock()


def failpoint(name: str) -> None:
    """Pass the point `name`: nothing happens unless it is armed."""
    if _armed:
        _pass(name)


def configure(spec: str) -> None:
    """Arm the points of `spec`, disarming all others; "" disarms everything.

    Raises: ValueError if an entry is malformed.
    """
    armed = dict(_parse(entry.strip()) for entry in spec.split(",") if entry.strip())
    with _lock:
        _armed.clear()
        _armed.update(armed)


def _parse(entry: str) -> tuple[str, _Armed]:
    name, _, rest = entry.partition("=")
    action, _, nth = rest.partition(":")
    if not name or action not in _ACTIONS or not (nth == "" or (nth.isdecimal() and int(nth) >= 1)):
        raise ValueError(f"{VARIABLE} entries are name=kill|exit|raise[:nth] with nth >= 1, got {entry!r}")
    return name, _Armed(action, int(nth or 1))


def _pass(name: str) -> None:
    with _lock:
        armed = _armed.get(name)
        if armed is None:
            return
        armed.remaining -= 1
        if armed.remaining > 0:
            return
        del _armed[name]
    _fire(name, armed.action)


def _fire(name: str, action: str) -> NoReturn:
    if action == "raise":
        raise Failpoint(f"failpoint {name}: raise")
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(1)


configure(os.environ.get(VARIABLE, ""))
