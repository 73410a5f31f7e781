"""Learning runs on `count`: a line of JSON each, appended over many sittings, and what follows from them.

A run is known by (task, arm, seed, variant, start): asked for again, it is left as it is. Only runs from the same
weights are compared.
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.gpu.curves import THRESHOLDS, Costs, Point, bound, eta, reach
from bench.results import Place, Row, record

ARMS = {
    1: "own synchronous loop, 1 GPU",
    2: "own synchronous loop, 2 GPUs data-parallel",
    3: "TRL GRPO, 2 GPUs colocated",
    4: "TRL AsyncGRPO, 1 engine + 1 trainer",
    5: "ours asynchronous, 1 searcher + 1 trainer",
    6: "ours asynchronous, 1 searcher + 1 trainer that hosts another",
    7: "ours asynchronous, a GPU for the trainer and for each searcher",
    8: "ours asynchronous, 1 searcher + 1 trainer, GRPO-type objective",
    9: "ours asynchronous, 2 GPUs, small searchers share them",
}

MANY, GRPO, SHARED = 7, 8, 9
ON_ONE_CARD = {3: "TRL GRPO, 1 GPU colocated", SHARED: "ours asynchronous, 1 GPU, small searchers share it"}
"""Arms where one card is all that they were given."""
ONE_CARD, TWO_CARDS = "one card", "two cards"
"""How variants of runs begin that had a host of so many cards for themselves: those stand beside each other."""
ASYNCHRONOUS = (5, 6, MANY, GRPO, SHARED)
"""Arms whose processes are those of `tba run`."""
SLOW_TASK = "count-slow"
"""`count`, where rewards wait: what generating costs is told by a step of `count`, not by one of its own."""

_OVER_SYNCHRONOUS = {"count": ">= 1.3", "count-long": ">= 2", SLOW_TASK: ">= 2"}
"""Goals of times as fast, by task."""
_TOKENS, _OF = "response tokens/s", "g, t, o, tau, bound of"
_SAID = {"mean staleness": "mean lag, steps"}
"""Facts that a table has by another name."""


@dataclass(slots=True)
class CountRun:
    """One run of one arm."""

    task: str
    arm: int
    seed: int
    gpus: int
    steps: list[tuple[float, float]]
    """(seconds since generation began, evaluations left out; mean reward of the step's batch)"""
    held_out: list[tuple[int, float, float]]
    """(step, seconds, score)"""
    variant: str = ""
    """Names settings that differ from the job file's."""
    start: str = ""
    """Digest of the weights that it began with. Those of the first three sittings were not taken: a, b and c."""
    settings: list[str] = field(default_factory=list)
    costs: dict[str, float] | None = None
    """Of arm 1: g, t, o in seconds and tau, see curves.Costs."""
    facts: dict[str, object] = field(default_factory=dict)
    """What else was measured: tokens a second, GPU busy, idle shares, staleness."""
    machine: str = ""
    date: str = ""
    command: str = ""

    @property
    def key(self) -> tuple[str, int, int, str, str]:
        """What a run is known by."""
        return self.task, self.arm, self.seed, self.variant, self.start

    @property
    def points(self) -> list[Point]:
        """The held-out curve."""
        return [Point(*p) for p in self.held_out]

    @property
    def steps_per_second(self) -> float:
        """After the first fifth, which holds every warm-up; of a single step all there is."""
        if len(self.steps) == 1:
            return 1 / self.steps[0][0]
        skip = len(self.steps) // 5
        (begun, _), (ended, _) = self.steps[skip], self.steps[-1]
        return (len(self.steps) - 1 - skip) / (ended - begun)


def read_runs(path: Path) -> list[CountRun]:
    """All runs of a file, the newest of a key; none if there is no file."""
    if not path.exists():
        return []
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    runs = [CountRun(**{**r, "steps": [tuple(s) for s in r["steps"]], "held_out": [tuple(p) for p in r["held_out"]]})
            for r in rows]  # fmt: skip
    return list({run.key: run for run in runs}.values())


def append_run(path: Path, run: CountRun) -> None:
    """One more line."""
    append_row(path, asdict(run))


def append_row(path: Path, row: Mapping[str, Any]) -> None:
    """A line of JSON, in one write: others may append at the same time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab", buffering=0) as file:
        file.write(json.dumps(row).encode() + b"\n")


def judge(runs: Sequence[CountRun]) -> list[Row]:
    """Rows for docs/results: an arm's medians over its seeds, with the number of seeds."""
    rows: list[Row] = []
    groups: dict[tuple[str, int, str, str], list[CountRun]] = {}
    newest = newest_first([run.start for run in runs])
    for run in sorted(_with_waits(runs), key=lambda r: (r.task, newest[r.start], r.arm, r.variant, r.seed)):
        groups.setdefault((run.task, run.arm, run.variant, run.start), []).append(run)
    for (task, arm, _, start), found in groups.items():
        told = ", ".join(filter(None, (_variant(found[0]), start and f"start {start}")))
        name = f"{task}, {arm_name(found[0])}{f' ({told})' if told else ''}"
        peers = _peers(groups, found[0])
        here = {a: p for a, p in peers.items() if _same_machine(found, p)}
        beside = here.get(2) or here.get(1)
        peer = beside or peers.get(2) or peers.get(1)
        ours = arm in ASYNCHRONOUS
        rows += _speed(name, found, beside, peers.get(1) if arm == 5 and task != SLOW_TASK else None)
        rows += _generated(name, found)
        rows += _thresholds(name, found, peer if ours else None)
        rows += _against(name, found, here[3], "TRL", ">= 2") if ours and 3 in here else []
        if ours and beside and beside[0].gpus == found[0].gpus:
            rows += _against(name, found, beside, "our synchronous loop", _OVER_SYNCHRONOUS.get(task))
    return rows + _scaling(groups)


def _with_waits(runs: Sequence[CountRun]) -> list[CountRun]:
    """Runs; a synchronous loop whose rewards wait has g, t and o of the same run of `count`, and all else in tau."""
    costs = {replace(r, task=SLOW_TASK).key: r.costs for r in runs if r.task == "count" and r.costs}
    return [_waiting(r, costs.get(r.key)) for r in runs]


def _waiting(run: CountRun, costs: dict[str, float] | None) -> CountRun:
    if costs is None:
        return run
    tail = (1 / run.steps_per_second - costs["train"] - costs["switch"]) / costs["generate"]
    return replace(run, costs=costs | {"tail": tail})


def arm_name(run: CountRun) -> str:
    """Of the run's arm, with the cards that it had."""
    return ON_ONE_CARD.get(run.arm, ARMS[run.arm]) if run.gpus == 1 else ARMS[run.arm]


def _peers(groups: Mapping[tuple[str, int, str, str], list[CountRun]], run: CountRun) -> dict[int, list[CountRun]]:
    """By arm, what a run is compared with: what ran on such a host, where it did."""
    host = ONE_CARD if run.gpus == 1 else TWO_CARDS if run.variant.startswith(TWO_CARDS) else ""
    variants = (host, "") if host else ("",)
    found: dict[int, list[CountRun]] = {}
    for arm in (arm for arm in (1, 2, 3) if arm != run.arm):
        there = [groups[key] for v in variants if (key := (run.task, arm, v, run.start)) in groups]
        if there:
            found[arm] = there[0]
    return found


def _same_machine(runs: list[CountRun], peers: list[CountRun]) -> bool:
    """Whether seconds of the two can be compared, as steps always can: by the cards of the host, which lanes share."""
    return runs[0].machine.split(", ")[-1] == peers[0].machine.split(", ")[-1]


def newest_first(starts: Sequence[str]) -> dict[str, int]:
    """The rank of each start, from those of all runs in the order of their measuring."""
    return {start: rank for rank, start in enumerate(dict.fromkeys(reversed(starts)))}


def _scaling(groups: Mapping[tuple[str, int, str, str], list[CountRun]]) -> list[Row]:
    """Tokens a second of several searchers over as many times that of one, of arm 7 where both are there."""
    rows: list[Row] = []
    arms = {(task, start, searchers(found[0])): found for (task, arm, _, start), found in groups.items() if arm == MANY}
    for (task, start, number), found in sorted(arms.items(), key=lambda i: i[0]):
        one = arms.get((task, start, 1))
        if number > 1 and one:
            alone, rate = _tokens(one), _tokens(found)
            idle = found[-1].facts.get("trainer waits for data")
            note = f"{rate:,.0f} tokens/s, one searcher {alone:,.0f}; {_seeds(found)}"
            note += f"; trainer waits for data {_short(idle)}"
            metric = f"{task}, {ARMS[MANY]} ({_number(number)}, start {start}): of linear in tokens/s"
            place = _place(found, "of linear in tokens/s")
            rows.append(_row(found, metric, rate / (number * alone), "of linear", None, None, ">= 0.95", note, place))
    return rows


def searchers(run: CountRun) -> int:
    """Of arm 7, which has three unless its settings say otherwise."""
    named = [s.partition("=")[2] for s in run.settings if s.startswith("searcher.replicas=")]
    return int(named[-1]) if named else 3


def _variant(run: CountRun) -> str:
    """What of its settings differs from the arm's; of arm 7 always with its number of searchers."""
    number = _number(searchers(run)) if run.arm == MANY else ""
    return ", ".join(filter(None, (number, run.variant if run.variant != number else "")))


def _number(searchers: int) -> str:
    return f"{searchers} searcher{'s' * (searchers > 1)}"


def _tokens(runs: list[CountRun]) -> float:
    return statistics.median(float(str(r.facts[_TOKENS])) for r in runs)


def _against(name: str, runs: list[CountRun], peers: list[CountRun], whom: str, target: str | None) -> list[Row]:
    """Time to the highest threshold that both have reached in most of their runs."""
    for threshold in sorted(THRESHOLDS, reverse=True):
        ours, theirs = ([found[1] for r in rs if (found := reach(r.points, threshold))] for rs in (runs, peers))
        if 2 * len(ours) > len(runs) and 2 * len(theirs) > len(peers):
            value, other = statistics.median(theirs) / statistics.median(ours), statistics.median(theirs)
            note = f"n = {len(runs)}, {whom} n = {len(peers)}; {statistics.median(ours):.1f} s against {other:.1f} s"
            metric = f"{name}: times as fast to {threshold:g} as {arm_name(peers[0])}"
            beside = f"{other:.1f} / {statistics.median(ours):.1f} s"
            place = _place(runs, f"times as fast as {whom}", label=f"to {threshold:g}", beside=beside)
            return [_row(runs, metric, value, "x", None, None, target, note, place)]
    return []


def _speed(name: str, runs: list[CountRun], peer: list[CountRun] | None, one_card: list[CountRun] | None) -> list[Row]:
    rates = [r.steps_per_second for r in runs]
    baseline, target, note = None, None, _seeds(runs)
    beside: dict[str, Any] = {}  # g, t, o, tau and the bound
    if peer is not None:
        baseline = (arm_name(peer[0]), statistics.median(r.steps_per_second for r in peer))
    if runs[0].arm in (1, 2) and runs[0].costs:
        beside = _costs(runs)
        note += f"; {_told(beside)}"
        note += " (g, t, o of count; tau with the waits for rewards)" if runs[0].task == SLOW_TASK else ""
    elif peer is not None and peer[0].costs:
        beside = _costs(peer) | {_OF: f"arm {peer[0].arm}"}
        note += f"; of {arm_name(peer[0])}: {_told(beside)}"
    if one_card is not None:
        costs = [Costs(**r.costs) for r in one_card if r.costs]
        if costs:
            limit = statistics.median(bound(c) for c in costs)
            c = costs[0]
            note += (
                f"; g {c.generate:.2f} t {c.train:.2f} o {c.switch:.3f} s, tau {c.tail:.2f}: "
                f"bound against two synchronous GPUs {limit:.2f}"
            )
            beside = _facts(c, limit) | {_OF: f"arm {one_card[0].arm}"}
            if peer is not None and peer[0].arm == 2:
                target = f">= {0.9 * limit:.3f}"
    facts = {k: v for k, v in runs[-1].facts.items() if isinstance(v, int | float | str | list)}
    note += "; " + ", ".join(f"{k} {_short(v)}" for k, v in facts.items()) if facts else ""
    place = _place(runs, "steps/s", facts=beside | {_SAID.get(k, k): v for k, v in facts.items() if k != _TOKENS})
    return [_row(runs, f"{name}: steps/s", statistics.median(rates), "steps/s", rates, baseline, target, note, place)]


def _costs(runs: list[CountRun]) -> dict[str, Any]:
    """g, t, o, tau and the bound of one searcher and one trainer, of the middle run by its bound."""
    known = sorted((Costs(**r.costs) for r in runs if r.costs), key=bound)
    return _facts(known[len(known) // 2], bound(known[len(known) // 2]))


def _facts(c: Costs, limit: float) -> dict[str, Any]:
    return {"g, s": c.generate, "t, s": c.train, "o, s": c.switch, "tau": c.tail, "bound of 1 + 1": limit}


def _told(costs: Mapping[str, Any]) -> str:
    g, t, o, tau, limit = list(costs.values())[:5]
    return f"g {g:.2f} t {t:.2f} o {o:.3f} s, tau {tau:.2f}, bound of 1 + 1 against 2 synchronous {limit:.2f}"


def _generated(name: str, runs: list[CountRun]) -> list[Row]:
    """Of all engines: how it grows with the number of searchers is what scaling means."""
    rates = [float(str(r.facts[_TOKENS])) for r in runs if _TOKENS in r.facts]
    if not rates:
        return []
    value, note = statistics.median(rates), _seeds(runs)
    place = _place(runs, "tokens/s")
    return [_row(runs, f"{name}: response tokens/s", value, "tokens/s", rates, None, None, note, place)]


def _thresholds(name: str, runs: list[CountRun], peer: list[CountRun] | None) -> list[Row]:
    rows = []
    for threshold in THRESHOLDS:
        reached = [found for run in runs if (found := reach(run.points, threshold))]
        if not reached:
            continue
        note = _seeds(runs) + (f"; {len(reached)} of {len(runs)} runs reached it" if len(reached) < len(runs) else "")
        theirs = [found for run in peer or [] if (found := reach(run.points, threshold))]
        seconds, steps = [s for _, s in reached], [n for n, _ in reached]
        timed = peer if peer and theirs and _same_machine(runs, peer) else None
        baseline = (arm_name(timed[0]), statistics.median(s for _, s in theirs)) if timed else None
        rows.append(
            _row(
                runs,
                f"{name}: seconds to {threshold:g}",
                statistics.median(seconds),
                "s",
                seconds,
                baseline,
                None,
                note,
                _place(runs, f"seconds to {threshold:g}"),
            )
        )
        if peer and theirs:
            their_steps, our_steps = statistics.median(n for n, _ in theirs), statistics.median(steps)
            told = f"{our_steps:.0f} steps, {arm_name(peer[0])} {their_steps:.0f}"
            value = eta(their_steps, our_steps)
            beside = f"{their_steps:.0f} / {our_steps:.0f} steps"
            place = _place(runs, "eta", label=f"to {threshold:g}", beside=beside)
            metric = f"{name}: eta at {threshold:g}"
            rows.append(_row(runs, metric, value, "steps/steps", None, None, ">= 0.9", told, place))
    ends = [run.held_out[-1][2] for run in runs if run.held_out]
    if ends:
        after = f"after {min(r.held_out[-1][0] for r in runs if r.held_out)} steps or more"
        metric, note = f"{name}: held out at the end", f"{_seeds(runs)}; {after}"
        place = _place(runs, "held out at the end, pass@1", beside=after)
        rows.append(_row(runs, metric, statistics.median(ends), "pass@1", ends, None, None, note, place))
    return rows


def _place(runs: list[CountRun], column: str, **more: Any) -> Place:
    run = runs[0]
    subject = {"arm": f"{run.arm}: {arm_name(run)}", "variant": _variant(run)}
    told = f" ({run.variant})" if run.variant else ""
    goal = f"{run.task}, {arm_name(run)}{told}: {column}"
    # A table has one baseline.
    hosts = {ONE_CARD: "on one GPU", TWO_CARDS: "on a host of two GPUs"}
    table = " ".join([run.task, *(told for host, told in hosts.items() if run.variant.startswith(host))])
    return Place(subject, column, table=table, start=run.start, goal=goal, **more)


def _row(
    runs: list[CountRun],
    metric: str,
    value: float,
    unit: str,
    values: list[float] | None,
    baseline: tuple[str, float] | None,
    target: str | None,
    note: str,
    place: Place,
) -> Row:
    row = record(
        "perf", "gpu_count", metric, value, unit, baseline=baseline, target=target, runs=values,
        seeds=[r.seed for r in runs], command=runs[-1].command, note=note, place=place,
    )  # fmt: skip
    # Measured there and then, not where and when the table is made.
    return replace(row, machine=runs[-1].machine, date=runs[-1].date)


def _seeds(runs: list[CountRun]) -> str:
    return f"n = {len(runs)}"


def _short(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
