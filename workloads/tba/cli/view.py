"""How a run looks on a terminal: one panel that is redrawn, or one plain line at a time."""

from collections.abc import Mapping
from dataclasses import replace

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tba.contracts.history import Progress
from tba.report.history import History
from tba.report.summary import Summary, rewards_generated, staleness_histogram

_BLOCKS = "▁▂▃▄▅▆▇█"
_SPARK_WIDTH = 40


def sparkline(values: list[float], width: int = _SPARK_WIDTH) -> str:
    """At most `width` blocks: means of equal runs of values, scaled between their least and greatest."""
    if not values:
        return ""
    size = -(-len(values) // width)
    means = [sum(part) / len(part) for part in (values[i : i + size] for i in range(0, len(values), size))]
    low, high = min(means), max(means)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((m - low) * scale)] for m in means)


def merge(summary: Summary, progress: Progress | None) -> Summary:
    """The summary from the bucket, with what the trainer says of itself right now in its place."""
    if progress is None or summary.state in ("Complete", "Failed"):
        return summary
    detail = _with_alerts(progress)
    if progress.state == "Starting":  # it does not know yet how far the run is
        return replace(summary, state=progress.state, detail=detail)
    return replace(
        summary,
        state=progress.state,
        detail=detail,
        step=progress.step,
        total_steps=progress.total_steps,
        policy_version=progress.policy_version,
        reward=_first(progress.reward, summary.reward),
        eval_score=_first(summary.eval_score, progress.eval_score),
        staleness_mean=_first(progress.staleness_mean, summary.staleness_mean),
        # Of the whole run, as at its end; the trainer knows of its own process alone.
        trainer_idle_percent=_first(summary.trainer_idle_percent, progress.trainer_idle_percent),
        replay_ratio=_first(progress.replay_ratio, summary.replay_ratio),
        searchers_alive=max(progress.searchers, summary.searchers_alive),
        trajectories=progress.trajectories,
        eta_seconds=_first(progress.eta_seconds, summary.eta_seconds),
    )


def panel(summary: Summary, history: History, *, processes: Mapping[str, int]) -> RenderableType:
    """The live view. `processes`: restarts by name; empty when they are not ours."""
    grid = Table.grid(padding=(0, 2))
    for _ in range(4):
        grid.add_column()
    cells = [(Text(name, style="dim"), Text(value)) for name, value in _cells(summary, history)]
    for (a, b), (c, d) in zip(cells[::2], cells[1::2], strict=True):
        grid.add_row(a, b, c, d)
    total = summary.total_steps or 1
    bar = Table.grid(padding=(0, 1))
    bar.add_row(ProgressBar(total=total, completed=min(summary.step, total), width=40), f"{summary.step}/{total}")
    state = Text(summary.state, style="bold red" if summary.state in ("Failed", "Silent") else "bold green")
    if summary.detail:
        state.append(f"  {summary.detail}", style="default")
    lines: list[RenderableType] = [state, bar, grid]
    if processes:
        lines.append(Text("  ".join(f"{n} ({r} restarts)" if r else n for n, r in processes.items()), style="dim"))
    return Panel(Group(*lines), title=Text(summary.owner or "run"), title_align="left")


def plain(summary: Summary) -> str:
    """One line of progress for logs and pipes."""
    parts = [f"step {summary.step}/{summary.total_steps or '?'}", summary.state]
    if summary.detail:
        parts.append(summary.detail)
    for name, value, unit in (
        ("reward", summary.reward, ""),
        ("eval", summary.eval_score, ""),
        ("staleness", summary.staleness_mean, ""),
        ("tokens/s", summary.generated_tokens_per_second, ""),
        ("version", summary.policy_version, ""),
        ("searchers", summary.searchers_alive, ""),
        ("without reward", summary.failed_trajectories or None, ""),
    ):
        if value is not None:
            parts.append(f"{name} {figure(value)}{unit}")
    if summary.trainer_idle_percent is not None:
        parts.append(f"idle {summary.trainer_idle_percent:.1f}%")
    if summary.eta_seconds is not None:
        parts.append(f"ETA {duration(summary.eta_seconds)}")
    return " · ".join(parts)


def closing(summary: Summary, history: History) -> str:
    """The summary at the end of a run: evaluation curve, staleness histogram, versions, replay."""
    lines = [f"{summary.state}: step {summary.step} of {summary.total_steps or '?'}, epoch {summary.epoch}"]
    if history.evaluations:
        lines.append("held-out evaluation (version: pass@1 ± standard error):")
        lines += [f"  {r.step:>6}: {r.pass_at_1:.3f} ± {r.standard_error:.3f}" for r in history.evaluations]
    counts = staleness_histogram(history)
    if counts:
        lines.append("staleness of trained rows (steps: share):")
        lines += bars({lag: counts[lag] for lag in sorted(counts)})
    for row in history.searchers:
        lines.append(f"{row.searcher} ({row.incarnation[:8]}): {row.versions} versions, {row.rows} rows")
    lines.append(f"replay branch: {summary.replay_slots} of {summary.slots} slots")
    if summary.quarantined_shards:
        lines.append(f"quarantined shards: {summary.quarantined_shards}")
    return "\n".join(lines)


def bars(counts: Mapping[int, int], width: int = 40, limit: int = 20) -> list[str]:
    """A histogram in text; what is beyond `limit` keys shares the last line."""
    total, keys = sum(counts.values()), sorted(counts)
    shown = [(str(k), counts[k]) for k in keys[:limit]]
    if len(keys) > limit:
        shown.append((f">{keys[limit - 1]}", sum(counts[k] for k in keys[limit:])))
    most = max(n for _, n in shown)
    return [f"  {k:>5}: {n / total:6.1%} {'█' * max(1, round(width * n / most))}" for k, n in shown]


def figure(value: float | int) -> str:
    """Whole numbers whole, others with three significant digits."""
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:.0f}"
    return f"{value:.3g}"


def duration(seconds: float) -> str:
    """1:02:03 or 2:03."""
    hours, rest = divmod(int(seconds), 3600)
    minutes, left = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes}:{left:02}"


def _with_alerts(progress: Progress) -> str:
    alerts = [a.message for a in progress.alerts]
    told = any(progress.detail in message for message in alerts)
    return "; ".join(alerts if told else [text for text in (progress.detail, *alerts) if text])


def _cells(s: Summary, history: History) -> list[tuple[str, str]]:
    rewards = rewards_generated(history.steps)
    score = _text(s.eval_score)
    if s.eval_standard_error is not None and s.eval_step is not None:
        score += f" ± {figure(s.eval_standard_error)} at {s.eval_step}"
    return [
        ("reward", f"{_text(s.reward)}  {sparkline(rewards)}"),
        ("evaluation", f"{score}  {sparkline([r.pass_at_1 for r in history.evaluations], 12)}"),
        ("staleness", f"{_text(s.staleness_mean)} mean, {_text(s.staleness_max)} max, with replayed rows"),
        ("trainer idle", "–" if s.trainer_idle_percent is None else f"{s.trainer_idle_percent:.1f} %"),
        ("generated", f"{_text(s.generated_tokens_per_second)} tokens/s"),
        ("trained", f"{_text(s.trained_tokens_per_second)} tokens/s"),
        ("searchers", f"{s.searchers_alive} alive{_idle(s.searcher_idle_percent)}"),
        ("version", _text(s.policy_version)),
        ("trajectories", f"{s.trajectories}{_failed(s.failed_trajectories)}, replay ratio {_text(s.replay_ratio)}"),
        ("ETA", duration(s.eta_seconds) if s.eta_seconds is not None else "–"),
    ]


def _text(value: float | int | None) -> str:
    return "–" if value is None else figure(value)


def _idle(percent: float | None) -> str:
    return "" if percent is None else f", {percent:.1f} % idle"


def _failed(rows: int) -> str:
    return f" ({rows} without a reward)" if rows else ""


def _first(value: float | None, other: float | None) -> float | None:
    return value if value is not None else other
