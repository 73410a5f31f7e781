"""One self-contained HTML page about a run: inline CSS and SVG, no script, no address of anything else.

All text of the model, of prompts and of searchers is hostile: it is escaped and stripped of control characters.
"""

import random
import time
import unicodedata
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from tba.contracts.history import EventRow, Progress, SampleRow
from tba.report.figures import draw_all, draw_main
from tba.report.history import History, read_history
from tba.report.split import SEARCHER_PHASES, TRAINER_PHASES, RoleTime, searcher_time, trainer_time
from tba.report.summary import WAITS, Summary, summarise
from tba.report.svg import Figure
from tba.store.protocol import ObjectStore

_MAX_TEXT_CHARS = 4000
_SAMPLES_EACH = 5
_MAX_EVENTS = 200
_HIDDEN = ("Cc", "Cf", "Cs", "Co")
"""Unicode categories: control, format (text direction), surrogate, private use."""


@dataclass(frozen=True, slots=True)
class _Samples:
    title: str
    rows: list[SampleRow]


def build_report(store: ObjectStore, *, now: float | None = None) -> str:
    """The whole report of the run in `store` as HTML. Raises: StoreUnavailable."""
    return render_report(read_history(store), now=time.time() if now is None else now, uri=store.uri)


def render_report(history: History, *, now: float, uri: str = "") -> str:
    """The report of a history; an empty one gives a page that says so."""
    return _environment().get_template("report.html.j2").render(
        uri=uri,
        made=_moment(now),
        summary=summarise(history, now),
        facts=_facts(summarise(history, now)),
        figures=[(f, Markup(f.svg) if f.svg else None) for f in draw_all(history)],
        times=_times(history),
        history=history,
        events=_events(history),
        samples=_choose_samples(history),
        config=history.run.config.model_dump(mode="json") if history.run else {},
        now=now,
    )  # fmt: skip


def render_live(history: History, progress: Progress, *, now: float) -> str:
    """The small page a trainer serves at `/`: state and the main figures; reloads itself."""
    figures: list[Figure] = draw_main(history)
    return _environment().get_template("live.html.j2").render(
        progress=progress,
        facts=_facts(summarise(history, now)),
        figures=[(f, Markup(f.svg)) for f in figures if f.svg],
        made=_moment(now),
    )  # fmt: skip


def _events(history: History) -> list[EventRow]:
    """The newest. Of a wait that was told again and again only the last: a long one would hide all else."""
    events = history.events
    repeated = {i for i, (a, b) in enumerate(pairwise(events)) if a.event in WAITS and a.event == b.event}
    return [row for i, row in enumerate(events) if i not in repeated][-_MAX_EVENTS:]


def clean(text: str) -> str:
    """`text` without what could disturb a page even when escaped: control and direction characters, surrogates."""
    cut = text if len(text) <= _MAX_TEXT_CHARS else f"{text[:_MAX_TEXT_CHARS]} … ({len(text)} characters)"
    return "".join(
        c if c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Co") else "\ufffd" for c in cut
    )


def flatten(config: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """(dotted path, value) of every leaf of a configuration."""
    rows: list[tuple[str, str]] = []
    for name, value in config.items():
        if isinstance(value, dict) and value:
            rows += flatten(value, f"{prefix}{name}.")
        else:
            rows.append((f"{prefix}{name}", "null" if value is None else str(value)))
    return rows


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("tba.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"clean": clean, "moment": _moment, "number": number, "flatten": flatten}
    return environment


def _choose_samples(history: History) -> list[_Samples]:
    """Best, worst and random, newest first among equals; the choice is the same at each call."""
    rows = history.samples
    if not rows:
        return []
    newest_first = rows[::-1]
    best = sorted(newest_first, key=lambda r: -r.reward)[:_SAMPLES_EACH]
    worst = sorted(newest_first, key=lambda r: r.reward)[:_SAMPLES_EACH]
    chance = random.Random(len(rows)).sample(rows, min(_SAMPLES_EACH, len(rows)))
    return [_Samples("Best", best), _Samples("Worst", worst), _Samples("Random", chance)]


@dataclass(frozen=True, slots=True)
class _RoleTable:
    role: str
    time: RoleTime
    rows: list[tuple[str, float, float]]
    """(phase in words, seconds, percent)."""


def _times(history: History) -> list[_RoleTable]:
    roles = (
        ("Trainer", trainer_time(history), TRAINER_PHASES),
        ("Searchers", searcher_time(history), SEARCHER_PHASES),
    )
    return [
        _RoleTable(role, time, [(words[n], s, time.percent(n) or 0.0) for n, s in time.seconds.items()])
        for role, time, words in roles
        if time.total > 0
    ]


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f} %"


def _facts(s: Summary) -> list[tuple[str, str]]:
    score = number(s.eval_score)
    if s.eval_score is not None:
        score += f" ± {number(s.eval_standard_error)} at {s.eval_step}"
    return [
        ("Step", f"{s.step} of {s.total_steps}" if s.total_steps else str(s.step)),
        ("Newest version", number(s.policy_version)),
        ("Reward (last 20 steps)", number(s.reward)),
        ("Held-out score", score),
        ("Staleness mean / max", f"{number(s.staleness_mean)} / {number(s.staleness_max)}"),
        ("Trainer idle", _percent(s.trainer_idle_percent)),
        ("Searchers idle", _percent(s.searcher_idle_percent)),
        *_utilisations(s),
        ("Generated tokens / s", number(s.generated_tokens_per_second)),
        ("Trained tokens / s", number(s.trained_tokens_per_second)),
        ("Replay slots", f"{s.replay_slots} of {s.slots}"),
        ("Trajectories ingested", number(s.trajectories)),
        ("Searchers alive / ever", f"{s.searchers_alive} / {s.searchers}"),
        ("Epoch (take-overs)", number(s.epoch)),
    ]


def _utilisations(s: Summary) -> list[tuple[str, str]]:
    """Only where they are known: a run without GPUs is not told that it lacks them."""
    found = (("Trainer MFU", s.trainer_mfu), ("Searcher MFU", s.searcher_mfu))
    return [(name, f"{100 * mfu:.1f} %") for name, mfu in found if mfu is not None]


def number(value: float | int | None) -> str:
    """For people: three significant digits, whole numbers whole, – for unknown."""
    if value is None:
        return "–"
    if isinstance(value, int) or float(value).is_integer():
        return f"{int(value):,}".replace(",", "\u202f")
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}".replace(",", "\u202f")


def _moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
