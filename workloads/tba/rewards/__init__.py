"""Reward functions: one file a task, found by name; or the user's own, by import path or file.

A reward is `fn(prompt, response, answer, **parameters) -> float`. Only the standard library is imported here, because
the child program of the sandbox (child.py) starts with this module.
"""

import difflib
import hashlib
import importlib
import inspect
import json
import pkgutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, cast

from tba.contracts.errors import UserError

RewardFunction = Callable[..., float]

_MACHINERY = frozenset({"child", "frames", "orphans", "process", "sandbox", "stored", "worker"})
_FILE_MODULE = "tba_user_reward"


@dataclass(frozen=True, slots=True)
class RewardSource:
    """Where a reward comes from; everything a child process needs to load it."""

    kind: Literal["name", "entrypoint", "file"]
    target: str  # built-in name, `pkg.mod:fn`, or the path of the file (for messages)
    text: str | None = None  # the file's source, read once so that a changed file cannot change a running job
    search_path: str | None = None  # put first in sys.path
    parameters: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Short name for messages and the reward version."""
        return Path(self.target).name if self.kind == "file" else self.target


@dataclass(frozen=True, slots=True)
class LoadedReward:
    """A reward ready to be called in this process."""

    function: RewardFunction
    source_hash: str  # of the source file's bytes and the parameters, 16 hex digits


def names() -> list[str]:
    """Return the built-in rewards: the files of this package."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name not in _MACHINERY)


def lookup(name: str) -> RewardFunction:
    """Return the built-in reward `name`.

    Raises:
        UserError: there is no such reward, or a package it needs is not installed.
    """
    return _function(_builtin_module(name), "reward")


def check_name(name: str) -> None:
    """Check that a built-in reward has this name; imports nothing.

    Raises:
        UserError: there is none.
    """
    if name not in names():
        raise UserError(
            f"task.reward.name: got {name!r}, there is no such reward. Built in: {', '.join(names())}; "
            "for your own code set task.reward.entrypoint to pkg.mod:fn."
        )


def load(source: RewardSource) -> LoadedReward:
    """Import a reward and check its parameters by name; the user's code runs here.

    Raises:
        UserError: nothing there, not callable, or parameters that it does not take.
    """
    if source.search_path is not None and source.search_path not in sys.path:
        sys.path.insert(0, source.search_path)
    module, attribute = _module(source)
    function = _function(module, attribute)
    check_parameters(function, source.parameters, label=source.label)
    validate = getattr(module, "check_parameters", None)
    if callable(validate):
        _check_values(validate, source)
    text = source.text.encode() if source.text is not None else _source_bytes(module)
    canonical = json.dumps(source.parameters, sort_keys=True).encode()
    return LoadedReward(function, hashlib.sha256(text + b"\0" + canonical).hexdigest()[:16])


def check_parameters(function: RewardFunction, parameters: Mapping[str, Any], *, label: str) -> None:
    """Check that `function(prompt, response, answer, **parameters)` can be called.

    Raises:
        UserError: an unknown or missing parameter, or not three positional arguments.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:  # a C function without a signature
        return
    try:
        signature.bind("prompt", "response", "answer", **parameters)
    except TypeError as error:
        accepted = [p.name for p in list(signature.parameters.values())[3:] if p.kind is not p.VAR_KEYWORD]
        raise UserError(
            f"task.reward.parameters do not fit the reward {label}: {error}. Got {sorted(parameters) or 'none'}; "
            f"it is called as fn(prompt, response, answer, **parameters) and takes {accepted or 'no parameters'}."
        ) from error


def required_answer(answer: str | None) -> str:
    """Return the answer, for rewards that cannot score without one.

    Raises:
        ValueError: the prompt has no answer; the sample is counted as failed, not scored 0.
    """
    if answer is None:
        raise ValueError("this reward needs an answer but the prompt has none: set task.prompts.answerField")
    return answer


def _module(source: RewardSource) -> tuple[ModuleType, str]:
    if source.kind == "name":
        return _builtin_module(source.target), "reward"
    if source.kind == "file":
        return _file_module(source), "reward"
    module, _, attribute = source.target.partition(":")
    return _entrypoint_module(module, source), attribute


def _builtin_module(name: str) -> ModuleType:
    check_name(name)
    try:
        return importlib.import_module(f"{__name__}.{name}")
    except ModuleNotFoundError as error:
        raise UserError(
            f"task.reward.name {name!r} needs the package {error.name!r}, which is not installed: "
            "install tba-operator[searcher]."
        ) from error


def _entrypoint_module(module: str, source: RewardSource) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module exists; one of its own imports does not
        raise UserError(
            f"task.reward.entrypoint: got {source.target!r}, there is no module {error.name!r}. "
            f"Put it in {source.search_path or 'PYTHONPATH'} or install it beside tba: in a cluster, in the image."
        ) from error


def _file_module(source: RewardSource) -> ModuleType:
    module = ModuleType(_FILE_MODULE)
    module.__file__ = source.target
    sys.modules[_FILE_MODULE] = module  # dataclasses and the like look their module up
    exec(compile(source.text or "", source.target, "exec"), module.__dict__)
    return module


def _function(module: ModuleType, attribute: str) -> RewardFunction:
    where = module.__file__ or module.__name__
    remedy = f"Define `def {attribute}(prompt, response, answer, **parameters) -> float` there."
    if not hasattr(module, attribute):
        known = [name for name, value in vars(module).items() if inspect.isfunction(value)]
        near = difflib.get_close_matches(attribute, known, n=1)
        raise UserError(f"{where} has no function {attribute!r}. {f'Did you mean {near[0]!r}?' if near else remedy}")
    function = getattr(module, attribute)
    if not callable(function):
        raise UserError(f"{attribute!r} of {where} cannot be called: got {type(function).__name__}. {remedy}")
    return cast(RewardFunction, function)


def _check_values(validate: Callable[..., object], source: RewardSource) -> None:
    try:
        validate(**source.parameters)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"task.reward.parameters of {source.label}: {error}. Got {json.dumps(source.parameters)}."
        ) from error


def _source_bytes(module: ModuleType) -> bytes:
    path = module.__file__
    return Path(path).read_bytes() if path is not None else module.__name__.encode()
