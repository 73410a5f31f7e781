"""What a learning run is judged by: time and steps to a threshold, and how much asynchrony can win. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

THRESHOLDS = (0.5, 0.6, 0.7, 0.75)


@dataclass(frozen=True, slots=True)
class Point:
    """Held-out score of the weights after a step. `seconds` leaves out what evaluating took."""

    step: int
    seconds: float
    score: float


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of one step of a synchronous loop on one card."""

    generate: float
    """g: all tokens of the step at the rate of a full engine."""
    train: float
    """t: reference pass, forward, backward and optimizer."""
    switch: float
    """o: new weights into the engine."""
    tail: float
    """tau: generation as measured / g, at least 1. The batch's last responses run in an engine that empties."""


def bound(costs: Costs) -> float:
    """The most that one generating and one training card can win over both doing both, in steps a second.

    Source: design, bench.md §3.
    """
    synchronous = costs.tail * costs.generate + costs.train + costs.switch
    return synchronous / (2 * max(costs.generate, costs.train))


def reach(points: Sequence[Point], threshold: float) -> tuple[float, float] | None:
    """(steps, seconds) at which the score first reaches `threshold`, linear between evaluations; None: it never did."""
    before: Point | None = None
    for point in points:
        if point.score >= threshold:
            if before is None or point.score == before.score:
                return float(point.step), point.seconds
            share = (threshold - before.score) / (point.score - before.score)
            return (
                before.step + share * (point.step - before.step),
                before.seconds + share * (point.seconds - before.seconds),
            )
        before = point
    return None


def eta(synchronous_steps: float, steps: float) -> float:
    """Steps of the synchronous loop / ours to the same threshold: what stale data costs is below 1."""
    return synchronous_steps / steps
