"""Objectives: pure tensor maths, one file each. A new objective adds a file, not a branch."""

import re
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from tba.contracts.errors import UserError


def lookup(name: str) -> Callable[..., Any]:
    """The function of an objective type: `TrajectoryBalance` -> `trajectory_balance.trajectory_balance`.

    Raises: UserError if there is no such file.
    """
    module = re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()
    if not module.isidentifier() or find_spec(f"{__name__}.{module}") is None:
        raise UserError(f"objective.type must name a file of tba/objectives, got {name!r}: try TrajectoryBalance")
    found = getattr(import_module(f"{__name__}.{module}"), module, None)
    if found is None:
        raise UserError(f"objective.type must name an objective, got {name!r}, whose file has no function {module}")
    return found
