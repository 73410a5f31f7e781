"""The `tba` command. Commands load when they are invoked: `tba --help` imports nothing heavy (tested).

One file a command. A file holds `command`, a function, or `app`, a typer application with commands of its own.
"""

import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

COMMANDS = {
    "run": "Run a job on this machine: trainer, searchers, live progress. Ctrl-C stops, rerun resumes.",
    "status": "Step, reward, staleness, searchers and newest version of a run, from its bucket.",
    "watch": "Follow a run live, from its bucket.",
    "report": "Write one self-contained HTML page about a run.",
    "metrics": "Write the history of a run as CSV or JSON lines.",
    "tensorboard": "Write the history of a run as TensorBoard event files; --follow keeps them new.",
    "trace": "Merge the timelines of a run's processes into one file for Perfetto.",
    "inspect": "What is in the bucket: shards, buffer, snapshots, checkpoint.",
    "export": "Write the weights of a step as a Hugging Face model directory.",
    "eval": "Evaluate the weights of a step or a model directory: greedy or pass@k.",
    "replay": "Train again offline from the recorded trajectories; compare with the checkpoint.",
    "pin": "Keep the checkpoint of a step, and so its weights, from being swept.",
    "storage": "Check a bucket, serve one for development, sweep or delete a run.",
    "trainer": "The trainer process (container entry point).",
    "searcher": "A searcher process (container entry point).",
}
"""Name -> one line of help; the code is in `tba.cli.<name>`."""
PLUGINS = "tba.commands"
"""Entry point group of further commands: each names a function or a typer application.

Their lines of help are in `COMMANDS` of the plugin's top package, which must be cheap to import.
"""


class _Lazy(TyperCommand):
    """Stands in for a command in help and completion until it is invoked."""

    def __init__(self, name: str, summary: str, target: str) -> None:
        super().__init__(name, help=summary)
        self.target = target

    def load(self) -> Any:
        """The real command."""
        module_name, _, attribute = self.target.partition(":")
        module = import_module(module_name)
        found = getattr(module, attribute) if attribute else getattr(module, "app", None) or module.command
        if not isinstance(found, typer.Typer):
            app = typer.Typer(add_completion=False)
            app.command(self.name, help=None)(found)
            found = app
        command = typer.main.get_command(found)
        command.name = self.name
        return command


class _LazyGroup(TyperGroup):
    """Loads a command's module only to invoke it or to complete its options."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for name, summary in COMMANDS.items():
            self.commands[name] = _Lazy(name, summary, f"tba.cli.{name}")
        for point in entry_points(group=PLUGINS):
            if point.name not in self.commands:
                self.commands[point.name] = _Lazy(point.name, _summary(point), point.value)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return name, command.load() if isinstance(command, _Lazy) else command, rest


def _summary(point: EntryPoint) -> str:
    try:
        package = import_module(point.module.partition(".")[0])
    except ImportError:  # a broken plugin breaks its own command only
        package = None
    return getattr(package, "COMMANDS", {}).get(point.name, f"(from {point.module})")


def _version(wanted: bool) -> None:
    if wanted:
        from tba import __version__

        typer.echo(f"tba {__version__}")
        raise typer.Exit


app = typer.Typer(
    cls=_LazyGroup,
    name="tba",
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Trajectory Balance with Asynchrony: post-train a language model, coupled by a bucket alone.",
)


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options of every command."""


def main(arguments: list[str] | None = None) -> None:
    """Entry point: parse, run, exit with the code of interface.md §2."""
    from tba.cli.exit import ending_of

    given = sys.argv[1:] if arguments is None else arguments
    command = typer.main.get_command(app)
    run = partial(command.main, args=given, prog_name="tba", standalone_mode=False)
    if given[:1] in (["trainer"], ["searcher"]):
        _main_of_container(run)
    sys.exit(ending_of(run).code)


def _main_of_container(run: Callable[[], Any]) -> NoReturn:
    """The same for what runs as process 1 of a container: SIGTERM counts from the start, and last words are left."""
    from tba.cli.exit import end_process, ending_of, sigterm_unwinds
    from tba.last_words import leave

    def guarded() -> Any:
        with sigterm_unwinds():
            return run()

    ending = ending_of(guarded)
    leave(ending.code, ending.message)
    end_process(ending.code)
