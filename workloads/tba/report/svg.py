"""Draw one figure as inline SVG that follows the page's light or dark scheme.

Colours of axes and text are `currentColor`. Only numbers and our own words may be drawn: no text of the model.
"""

import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

_INK = "#010203"  # replaced by currentColor in the SVG
BLUE, ORANGE, GREEN, RED, GREY = "#3b82f6", "#f59e0b", "#10b981", "#ef4444", "#9ca3af"
_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "tba",
    "font.family": "sans-serif",
    "font.size": 9,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.4,
}
_MAX_POINTS = 800


@dataclass(frozen=True, slots=True)
class Figure:
    """One picture with its words. `svg` is None while there is nothing to draw."""

    name: str
    title: str
    caption: str
    svg: str | None
    text: str = ""
    """What it shows, in words, for who cannot see it."""


def thin(xs: Sequence[float], ys: Sequence[float], limit: int = _MAX_POINTS) -> tuple[list[float], list[float]]:
    """At most `limit` points: means of equal runs of points, so that a long run stays a small page."""
    size = -(-len(xs) // limit) or 1
    pairs = [(xs[i : i + size], ys[i : i + size]) for i in range(0, len(xs), size)]
    return [sum(x) / len(x) for x, _ in pairs], [sum(y) / len(y) for _, y in pairs]


def smooth(ys: Sequence[float], window: int) -> list[float]:
    """Mean of the last `window` values at each place; values that are not finite do not count."""
    result: list[float] = []
    for end in range(1, len(ys) + 1):
        recent = [y for y in ys[max(0, end - window) : end] if math.isfinite(y)]
        result.append(sum(recent) / len(recent) if recent else math.nan)
    return result


def draw(name: str, title: str, caption: str, plot: Callable[[Axes], bool]) -> Figure:
    """The figure that `plot` draws on its axes; without a picture if `plot` says there is nothing to draw."""
    with matplotlib.rc_context(_STYLE):
        canvas = Canvas(figsize=(5.2, 2.7), layout="constrained")
        axes = canvas.add_subplot()
        if not plot(axes):
            return Figure(name, title, caption, None)
        axes.grid(True, axis="y", color=GREY, alpha=0.25, linewidth=0.5)
        axes.set_axisbelow(True)
        if axes.get_legend() is None and axes.get_legend_handles_labels()[0]:
            axes.legend(loc="best")
        buffer = io.StringIO()
        canvas.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return Figure(name, title, caption, _inline(buffer.getvalue(), name))


def _inline(svg: str, name: str) -> str:
    """Only the <svg> element, ids made unique on the page, ink that follows the colour scheme."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', svg)
    svg = re.sub(r'(href="#|url\(#)', rf"\1{name}-", svg)
    # A page that stands alone names no address, not even that of an XML name space.
    svg = re.sub(r'\s+xmlns(:xlink)?="[^"]*"', "", svg).replace("xlink:href", "href")
    return svg.replace(_INK, "currentColor").strip()
