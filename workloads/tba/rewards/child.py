"""The program of one reward process: `python -P -m tba.rewards.child SOCKET_FD PARENT_PID`.

    parent ── {source}                          ─► load the reward        ─► {"ready": hash} or {"failed": text}
    parent ── [id, prompt, response, answer] …  ─► call it, one at a time ─► [id, reward] or [id, null, reason, text]

Every reply is written before the next call starts, so the parent can time each call. Nothing heavy is imported:
what the reward imports is its own.
"""

import faulthandler
import json
import math
import os
import signal
import sys
from typing import Any

from tba.contracts.errors import UserError
from tba.parent import die_with_parent
from tba.rewards import LoadedReward, RewardSource, load
from tba.rewards.frames import FrameReader, frame

_READ_BYTES = 1 << 16
_MAX_ERROR_CHARS = 300
_MAX_REWARD = 3.4e38  # shards hold float32


def main() -> None:
    """Serve the parent until it closes the socket."""
    fd, parent_pid = int(sys.argv[1]), int(sys.argv[2])
    os.set_inheritable(fd, False)  # programs the reward starts must not hold the socket open
    _die_with(parent_pid)
    faulthandler.enable()  # a segfault leaves its stack in the captured output
    reader = FrameReader()
    reward, parameters = None, {}
    while data := os.read(fd, _READ_BYTES):
        for payload in reader.feed(data):
            message = json.loads(payload)
            if reward is None:
                reward, parameters = _load(fd, message), message["parameters"]
            else:
                _answer(fd, reward, message, parameters)
    _kill_own_group()


def _die_with(parent_pid: int) -> None:
    die_with_parent(signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before the line above
        os._exit(1)


def _kill_own_group() -> None:
    if os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)


def _load(fd: int, message: dict[str, Any]) -> LoadedReward:
    try:
        reward = load(RewardSource(**message))
    except UserError as error:
        _send(fd, {"failed": str(error)})
    except BaseException as error:  # the user's code may raise anything, SystemExit included
        _send(fd, {"failed": _describe(error)})
    else:
        _send(fd, {"ready": reward.source_hash})
        return reward
    os._exit(1)


def _answer(fd: int, reward: LoadedReward, message: list[Any], parameters: dict[str, Any]) -> None:
    call_id, prompt, response, answer = message
    pid = os.getpid()
    try:
        reply = _checked(call_id, reward.function(prompt, response, answer, **parameters))
    except MemoryError as error:
        reply = [call_id, None, "memory", _describe(error)]
    except BaseException as error:  # the user's code may raise anything, SystemExit included
        reply = [call_id, None, "exception", _describe(error)]
    if os.getpid() != pid:  # the reward forked and both came back: only one may answer
        os._exit(0)
    signal.setitimer(signal.ITIMER_REAL, 0)  # an alarm left behind would kill the next call
    _send(fd, reply)


def _checked(call_id: int, value: object) -> list[Any]:
    # Text has no __float__; numpy and torch scalars do. A bool is more often a forgotten conversion than a reward.
    if isinstance(value, bool) or not hasattr(value, "__float__"):
        return [call_id, None, "invalid", f"returned {type(value).__name__}, not a number: return a float"]
    reward = float(value)  # type: ignore[arg-type]
    if not math.isfinite(reward) or abs(reward) > _MAX_REWARD:
        return [call_id, None, "invalid", f"returned {reward}, not a finite number (float32)"]
    return [call_id, reward]


def _describe(error: BaseException) -> str:
    try:
        text = f"{type(error).__name__}: {str(error)[:_MAX_ERROR_CHARS]}"
    except BaseException:  # its own __str__ failed
        text = type(error).__name__
    if isinstance(error, SyntaxError):
        return text  # it names the file and line that it is about; the traceback ends in the importer
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    if traceback is None:
        return text
    return f"{text} ({os.path.basename(traceback.tb_frame.f_code.co_filename)}:{traceback.tb_lineno})"


def _send(fd: int, message: object) -> None:
    view = memoryview(frame(json.dumps(message).encode()))
    while view:
        view = view[os.write(fd, view) :]


if __name__ == "__main__":
    main()
