"""The figures of a run: what each shows, in which words, from which rows."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from tba.report.history import History
from tba.report.split import (
    SEARCHER_PHASES,
    TRAINER_PHASES,
    Stretch,
    coarsen,
    in_words,
    searcher_stretches,
    searcher_time,
    trainer_stretches,
    trainer_time,
)
from tba.report.summary import staleness_histogram, weighted_mean
from tba.report.svg import BLUE, GREEN, GREY, ORANGE, RED, Figure, draw, smooth, thin

_PHASE_COLORS = {
    "forward_backward": BLUE,
    "generate": BLUE,
    "optimizer": "#8b5cf6",
    "swap": "#8b5cf6",
    "reference": GREEN,
    "collate": "#84cc16",
    "ingest": "#14b8a6",
    "stage": "#eab308",
    "capture": "#a16207",
    "asleep": "#94a3b8",
    "wait_data": RED,
    "wait_weights": RED,
    "wait_reward": "#eab308",
    "wait_storage": "#f97316",
    "wait_idle": "#a16207",
    "wait_engine": "#a16207",
    "other": GREY,
}
"""Work is cold, copies are earth, waits are warm."""


def draw_all(history: History) -> list[Figure]:
    """Every figure of the report, in reading order."""
    return _draw(history, [figure[0] for figure in _FIGURES])


def draw_main(history: History) -> list[Figure]:
    """The few figures of the live page."""
    wanted = ("reward", "evaluation", "staleness", "time")
    return _draw(history, wanted)


def _draw(history: History, wanted: Sequence[str]) -> list[Figure]:
    words = {
        "time": in_words(trainer_time(history), TRAINER_PHASES),
        "searchertime": in_words(searcher_time(history), SEARCHER_PHASES),
    }
    return [
        replace(draw(name, title, caption, partial(plot, history)), text=words.get(name, ""))
        for name, title, caption, plot in _FIGURES
        if name in wanted
    ]


def _series(axes: Axes, xs: Sequence[float], ys: Sequence[float], color: str, label: str | None = None) -> None:
    """A faint line of the values and a strong one of their running mean."""
    if len(xs) >= 30:
        window = max(5, len(xs) // 40)
        axes.plot(*thin(xs, ys), color=color, alpha=0.25, linewidth=0.8)
        axes.plot(*thin(xs, smooth(ys, window)), color=color, label=label)
    else:
        axes.plot(xs, ys, color=color, label=label, marker=".", markersize=4)


def _steps(history: History, name: str) -> tuple[list[float], list[float]]:
    pairs = [(r.step, getattr(r, name)) for r in history.steps]
    kept = [(float(s), float(v)) for s, v in pairs if v is not None and math.isfinite(v)]
    return [s for s, _ in kept], [v for _, v in kept]


def _lines(ylabel: str, *series: tuple[str, str, str | None]) -> Callable[[History, Axes], bool]:
    """A plot of columns of the step rows: (column, colour, label)."""

    def plot(history: History, axes: Axes) -> bool:
        drawn = False
        for name, color, label in series:
            xs, ys = _steps(history, name)
            if xs:
                _series(axes, xs, ys, color, label)
                drawn = True
        axes.set(xlabel="step", ylabel=ylabel)
        return drawn

    return plot


def _evaluation(history: History, axes: Axes) -> bool:
    rows = history.evaluations
    if not rows:
        return False
    xs = [r.step for r in rows]
    axes.errorbar(
        xs, [r.pass_at_1 for r in rows], [r.standard_error for r in rows],
        color=GREEN, marker="o", markersize=3, capsize=2, elinewidth=0.8, label="pass@1 ± standard error",
    )  # fmt: skip
    if any(r.samples > 1 for r in rows):
        axes.plot(xs, [r.pass_at_k for r in rows], color=ORANGE, marker=".", label=f"pass@{rows[-1].samples}")
    axes.set(xlabel="version", ylabel="held-out score")
    return True


def _staleness(history: History, axes: Axes) -> bool:
    counts = staleness_histogram(history)
    if not counts:
        return False
    total = sum(counts.values())
    cap = _percentile(counts, 0.995)
    shown = Counter[int]()
    for lag, rows in counts.items():
        shown[min(lag, cap)] += rows
    lags = list(range(min(shown), cap + 1))
    axes.bar(lags, [shown[lag] / total for lag in lags], color=BLUE, width=0.9)
    mean = sum(lag * n for lag, n in counts.items()) / total
    axes.axvline(mean, color=RED, linewidth=1, label=f"mean {mean:.1f}, max {max(counts)}")
    axes.set(xlabel=f"steps behind (last bar: {cap} or more)", ylabel="share of trained rows")
    return True


def _throughput(history: History, axes: Axes) -> bool:
    rows = history.steps
    if len(rows) < 2:
        return False
    for name, color, label in (
        ("generated_tokens", ORANGE, "generated"),
        ("trained_tokens", BLUE, "trained"),
    ):
        xs, ys = _rates([r.wall_seconds for r in rows], [getattr(r, name) for r in rows])
        axes.plot(xs, ys, color=color, label=label)
    axes.set(xlabel="minutes of training", ylabel="response tokens / s", ylim=(0, None))
    return True


def _shares(stretches: list[Stretch], words: Mapping[str, str], axes: Axes) -> bool:
    """Stacked shares of time by phase over steps; one level stretch a group of steps."""
    shown = [s for s in coarsen(stretches) if s.time.total > 0]
    if not shown:
        return False
    phases = [name for name in words if any(s.time.seconds.get(name, 0.0) > 0 for s in shown)]
    edges = [s.first_step for s in shown] + [shown[-1].last_step]
    shares = [[100 * s.time.seconds.get(name, 0.0) / s.time.total for s in shown] for name in phases]
    levels = [[*values, values[-1]] for values in shares]
    colors = [_PHASE_COLORS[name] for name in phases]
    axes.stackplot(edges, *levels, labels=[words[name] for name in phases], colors=colors, step="post", linewidth=0)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1.0, 0.5))
    axes.set(xlabel="step", ylabel="% of time", xlim=(edges[0], edges[-1]), ylim=(0, 100))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))
    return True


def _trainer_shares(history: History, axes: Axes) -> bool:
    return _shares(trainer_stretches(history), TRAINER_PHASES, axes)


def _searcher_shares(history: History, axes: Axes) -> bool:
    return _shares(searcher_stretches(history), SEARCHER_PHASES, axes)


def _versions(history: History, axes: Axes) -> bool:
    rows = history.steps
    if not rows:
        return False
    xs = [r.step for r in rows]
    axes.step(xs, [r.published_version for r in rows], where="post", color=GREEN, label="published")
    newest = [r.step - min(r.staleness) for r in rows if r.staleness]
    oldest = [r.step - max(r.staleness) for r in rows if r.staleness]
    with_rows = [r.step for r in rows if r.staleness]
    axes.fill_between(with_rows, oldest, newest, color=BLUE, alpha=0.25, linewidth=0, label="in the batch")
    mean = [r.step - (weighted_mean(Counter(r.staleness)) or 0.0) for r in rows if r.staleness]
    axes.plot(*thin(with_rows, mean), color=BLUE, linewidth=1, label="batch mean")
    axes.set(xlabel="step", ylabel="policy version")
    return True


def _lengths(history: History, axes: Axes) -> bool:
    row = history.lengths
    if row is None or not (row.generated or row.trained):
        return False
    top = max([*row.generated, *row.trained])
    edges = [top * i / 40 for i in range(41)]
    for counts, color, label in ((row.generated, ORANGE, "generated"), (row.trained, BLUE, "trained")):
        axes.stairs(
            _binned(counts, edges), edges, color=color, label=f"{label} ({sum(counts.values())})", linewidth=1.4
        )
    axes.set(xlabel="response tokens", ylabel="share of rows")
    return True


def _replay(history: History, axes: Axes) -> bool:
    xs, ys = _steps(history, "replay_ratio")
    if not xs:
        return False
    axes.plot(*thin(xs, ys), color=BLUE, label="rows trained / ingested, last 100 steps")
    share = [100 * r.replay_slots / max(r.slots, 1) for r in history.steps]
    axes.plot(*thin([r.step for r in history.steps], smooth([s / 100 for s in share], 20)), color=ORANGE,
              label="share of slots from replay (mean of 20 steps)")  # fmt: skip
    axes.set(xlabel="step", ylabel="ratio", ylim=(0, None))
    return True


def _buffer(history: History, axes: Axes) -> bool:
    xs, ys = _steps(history, "buffer_rows")
    if not xs:
        return False
    axes.plot(*thin(xs, ys), color=BLUE, label="distinct rows in the buffer")
    axes.plot(*thin(*_steps(history, "ingested_rows")), color=ORANGE, label="rows ingested")
    axes.plot(*thin(*_steps(history, "duplicate_rows")), color=GREY, label="of them duplicates")
    axes.set(xlabel="step", ylabel="rows")
    return True


def _rates(times: Sequence[float], totals: Sequence[float]) -> tuple[list[float], list[float]]:
    """(minutes, units a second) over at most 60 equal stretches of rows."""
    size = max(1, -(-len(times) // 60))
    marks = [*range(0, len(times) - 1, size), len(times) - 1]
    pairs = [(a, b) for a, b in zip(marks[:-1], marks[1:], strict=True) if times[b] > times[a]]
    minutes = [(times[a] + times[b]) / 120 for a, b in pairs]
    return minutes, [(totals[b] - totals[a]) / (times[b] - times[a]) for a, b in pairs]


def _binned(counts: Mapping[int, int], edges: Sequence[float]) -> list[float]:
    width = edges[1] - edges[0]
    bins = [0.0] * (len(edges) - 1)
    total = sum(counts.values()) or 1
    for length, rows in counts.items():
        bins[min(int(length / width) if width else 0, len(bins) - 1)] += rows / total
    return bins


def _percentile(counts: Counter[int], share: float) -> int:
    total, seen = sum(counts.values()), 0
    for key in sorted(counts):
        seen += counts[key]
        if seen >= share * total:
            return key
    return max(counts)


_FIGURES: list[tuple[str, str, str, Callable[[History, Axes], bool]]] = [
    ("reward", "Reward", "Mean reward of the trained batch and of everything generated since the last step.",
     _lines("mean reward", ("reward_mean", BLUE, "trained batch"),
            ("generated_reward_mean", ORANGE, "generated since last step"))),
    ("evaluation", "Held-out evaluation", "Of snapshots on prompts never trained on; bars are one standard error.",
     _evaluation),
    ("loss", "Loss", "Its gradient is what counts; its value is not comparable between runs.",
     _lines("loss", ("loss", BLUE, None))),
    ("logz", "log Ẑ", "Estimated log partition function, mean over the groups of a batch.",
     _lines("log Ẑ", ("log_z", GREEN, None))),
    ("kl", "Distance from the reference", "Mean summed log-ratio to the reference, and its spread within groups.",
     _lines("nats a response", ("kl", BLUE, "KL to reference"), ("ell_std", ORANGE, "std of log-ratio in a group"))),
    ("staleness", "Staleness", "Optimizer steps between the weights that sampled a row and the step that trained it.",
     _staleness),
    ("versions", "Versions published and trained", "The band spans the policies in each batch.", _versions),
    ("throughput", "Throughput", "Response tokens generated (ingested) and trained on.", _throughput),
    ("time", "Where the trainer's time goes", "Shares of all its time. Idle is the two waits together.",
     _trainer_shares),
    ("searchertime", "Where the searchers' time goes", "Of all searcher processes together. Idle is all the waits.",
     _searcher_shares),
    ("lengths", "Response lengths", "Trained should follow generated: no bias to short responses.", _lengths),
    ("replay", "Replay", "How much is trained again, and how many slots take the replay branch.", _replay),
    ("buffer", "Replay buffer", "Rows over time.", _buffer),
    ("signal", "Groups with a signal", "Share of groups whose rewards differ.",
     _lines("share of groups", ("signal_groups_fraction", GREEN, None))),
    ("gradient", "Gradient norm", "Before clipping.", _lines("norm", ("grad_norm", BLUE, None))),
    ("hold", "Hold of the reference", "β · std(log-ratio) / std(reward): below 0.05 with lag, β no longer holds.",
     _lines("ratio", ("beta_ratio", BLUE, None))),
]  # fmt: skip
