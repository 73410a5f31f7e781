"""Where progress goes: a panel redrawn in place on a terminal, plain lines elsewhere."""

import re
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live

from tba.cli.view import panel, plain
from tba.report.history import History
from tba.report.summary import Summary

_PLAIN_SECONDS = 10.0
"""Between plain lines while nothing but numbers changes."""


class Screen:
    """Use as a context manager. `show` is cheap to call often."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False)
        self._live = Live(console=self._console, auto_refresh=False) if self._console.is_terminal else None
        self._said: tuple[str, str] | None = None
        self._said_at = 0.0

    def __enter__(self) -> Self:
        if self._live:
            self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.__exit__(kind, error, trace)

    def tell(self, line: str) -> None:
        """A line of news: stays above the panel."""
        self._console.print(line, markup=False, soft_wrap=True)

    def show(self, summary: Summary, history: History, *, processes: Mapping[str, int] | None = None) -> None:
        """The state of the run now."""
        if self._live:
            self._live.update(panel(summary, history, processes=processes or {}), refresh=True)
            return
        now, said = time.monotonic(), (summary.state, re.sub(r"\d+", "", summary.detail))
        if said != self._said or now - self._said_at >= _PLAIN_SECONDS:
            self._said, self._said_at = said, now
            self._console.print(plain(summary), markup=False, soft_wrap=True)
