"""Prints what the image of a role needs, one requirement a line: input of `uv pip compile` (see `make lock`)."""

import sys
import tomllib
from pathlib import Path

EXTRAS = {
    "trainer": ("trainer", "cli", "report"),
    # And the trainer's: it is the image of a trainer with an engine of its own (trainer.colocatedSearcher).
    "searcher": ("searcher", "vllm", "cli", "trainer", "report"),
}
PROJECT = Path(__file__).parent.parent / "pyproject.toml"


def requirements(role: str) -> list[str]:
    """Requirements of the role's extras with those they name, and of the project itself."""
    project = tomllib.loads(PROJECT.read_text())["project"]
    found = set(project["dependencies"])
    for extra in EXTRAS[role]:
        found |= _expand(project, extra)
    return sorted(found)


def _expand(project: dict, extra: str) -> set[str]:
    found: set[str] = set()
    for requirement in project["optional-dependencies"][extra]:
        if requirement.startswith(f"{project['name']}["):
            for inner in requirement.split("[")[1].rstrip("]").split(","):
                found |= _expand(project, inner)
        else:
            found.add(requirement)
    return found


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1])))  # noqa: T201 - the output
