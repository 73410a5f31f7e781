"""Commands of docs/results, numbered and listed by where they ran; what those of a program share is written once."""

import re
from collections.abc import Mapping
from itertools import groupby
from typing import Any

Origin = tuple[str, str]
"""(machine and date, command)"""
_WORD = re.compile(r"""(?:[^\s'"]|'[^']*'|"[^"]*")+""")


def origin(row: dict[str, Any]) -> Origin:
    """Where and when a row was measured, and by what."""
    return f"{row['machine']}, {row['date']}", row["command"]


def numbered(rows: list[dict[str, Any]]) -> dict[Origin, int]:
    """The number of each command: those of one machine and date follow each other."""
    origins = list(dict.fromkeys(map(origin, rows)))
    places = list(dict.fromkeys(place for place, _ in origins))
    return {o: i for i, o in enumerate(sorted(origins, key=lambda o: places.index(o[0])), 1)}


def listed(numbers: Mapping[Origin, int]) -> list[str]:
    """A block of shell: functions of what is shared, then a command a line under its machine and date."""
    short: dict[str, str] = {}
    lines = ["```sh"]
    commands = list(dict.fromkeys(command for _, command in numbers))
    for program in dict.fromkeys(map(_program, commands)):
        found = [c for c in commands if _program(c) == program]
        if len(found) == 1:
            short[found[0]] = found[0]
            continue
        shared, name = _shared([_options(c) for c in found]), program.split()[-1].rpartition("/")[2].removesuffix(".py")
        lines += [f'{name}() {{ {" ".join([program, *shared])} "$@"; }}']
        short |= {c: " ".join([name, *_without(_options(c), shared)]) for c in found}
    for place, found in groupby(numbers, lambda o: o[0]):
        lines += [f"## {place}", *(f"# {numbers[o]}\n{short[o[1]]}" for o in found)]
    return [*lines, "```", ""]


def _program(command: str) -> str:
    """Up to the script."""
    return command.partition(".py")[0] + ".py" if ".py" in command else command


def _options(command: str) -> list[str]:
    """Each with its values, as they were typed."""
    options: list[str] = []
    for word in _WORD.findall(command.removeprefix(_program(command))):
        if word.startswith("-") or not options:
            options.append(word)
        else:
            options[-1] += f" {word}"
    return options


def _shared(commands: list[list[str]]) -> list[str]:
    """Options that are in each, and in each before any other value of the same option, which would win."""

    def first(options: list[str], name: str) -> str:
        return next((o for o in options if o.partition(" ")[0] == name), "")

    return [
        o for o in dict.fromkeys(commands[0]) if all(first(options, o.partition(" ")[0]) == o for options in commands)
    ]


def _without(options: list[str], shared: list[str]) -> list[str]:
    left = list(options)
    for option in shared:
        left.remove(option)
    return left
