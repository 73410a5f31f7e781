"""Learning curves of `count` as a picture: held-out score over seconds and over steps, a thin line a run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from bench.gpu.count_runs import ONE_CARD, TWO_CARDS, CountRun, arm_name
from matplotlib.axes import Axes
from matplotlib.figure import Figure

_COLOURS = ("#7dd3fc", "#f59e0b", "#10b981", "#ef4444", "#8b5cf6", "#6b7280", "#ec4899", "#14b8a6", "#1e3a8a")
_STYLE: Any = {"svg.fonttype": "none", "svg.hashsalt": "tba", "font.size": 9, "legend.frameon": False}


def compared(runs: Sequence[CountRun], host: str, task: str = "count") -> list[CountRun]:
    """Runs on hosts of one kind, from one start: of the start that has most arms, then most of them."""
    starts: dict[str, list[CountRun]] = {}
    for run in runs:
        if run.task == task and run.held_out and run.variant.startswith(host):
            starts.setdefault(run.start, []).append(run)
    found = max(starts.values(), key=lambda rs: (len({r.arm for r in rs}), len(rs)), default=[])
    return sorted(found, key=lambda r: (r.arm, r.seed))


def draw_all(runs: Sequence[CountRun], path: Path) -> None:
    """The comparison on two cards at `path`, that on one beside it."""
    draw(compared(runs, TWO_CARDS), path)
    draw(compared(runs, ONE_CARD), path.with_stem(f"{path.stem}_one_card"))


def draw(chosen: Sequence[CountRun], path: Path) -> None:
    """Write an SVG, the same bytes for the same runs. Nothing if there are none."""
    if not chosen:
        return
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(9.0, 3.4), layout="constrained")
        seconds, steps = figure.subplots(1, 2, sharey=True)
        _plot(seconds, chosen, 1, "seconds since generation began, evaluations left out")
        _plot(steps, chosen, 0, "optimizer steps")
        seconds.set_ylabel("held out, pass@1 at T = 1")
        figure.legend(*seconds.get_legend_handles_labels(), loc="outside lower center", ncols=2)
        figure.savefig(path, format="svg", facecolor="white", metadata={"Date": None, "Creator": None})


def _plot(axes: Axes, runs: Sequence[CountRun], column: int, label: str) -> None:
    numbers = {arm: sum(r.arm == arm for r in runs) for arm in dict.fromkeys(r.arm for r in runs)}
    for run in runs:
        name = f"{arm_name(run)} (n = {numbers.pop(run.arm)})" if run.arm in numbers else None
        points = [(p[column], p[2]) for p in run.held_out]
        axes.plot(*zip(*points, strict=True), color=_COLOURS[run.arm - 1], linewidth=1.3, label=name)
    axes.set_xlabel(label)
    axes.grid(True, color="#9ca3af", alpha=0.3, linewidth=0.5)
    axes.spines[["top", "right"]].set_visible(False)
