"""Curves and histograms as inline SVG: no script, no network, sharp in print. The tip of a mark tells its number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from markupsafe import Markup
from matplotlib.ticker import MaxNLocator

COLOURS = ("#2463a8", "#c8552b", "#2f8f63", "#7d5bb0", "#a5791c", "#b83d73", "#3a8ea3", "#6b6f76")
DASHES = ("", "5 3", "2 2", "7 2 2 2")  # in print without colours
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 360, 190, 46, 10, 8, 22
DENSE = 240  # points beyond which a curve is drawn as means of runs of points inside the band of their extremes

Point = tuple[float, float | None]


def short(value: float | None) -> str:
    """At most four digits: 12.3k, 0.00012, 4.1M."""
    if value is None or not math.isfinite(value):
        return "-"
    if abs(value) < 1e-15:  # rounding
        return "0"
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):.3g}{letter}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


class Frame:
    """The two axes of a chart, and what was drawn into it."""

    def __init__(self, x: Sequence[float], y: Sequence[float], *, whole_x: bool = True, from_zero: bool = False):
        self.x, self.xticks = span(x, 6, whole=whole_x, tight=True)
        self.y, self.yticks = span([*y, 0.0] if from_zero else y, 4)
        self.parts: list[str] = []
        for value in self.yticks:
            at = self.down(value)
            self.parts.append(f'<path class="grid" d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}"/>')
            self.parts.append(f'<text x="{LEFT - 5}" y="{at + 3.5:.1f}" text-anchor="end">{short(value)}</text>')
        for value in self.xticks:
            at = self.across(value)
            self.parts.append(f'<text x="{at:.1f}" y="{HEIGHT - 7}" text-anchor="middle">{short(value)}</text>')
        self.parts.append(f'<path class="axis" d="M{LEFT} {HEIGHT - BOTTOM}H{WIDTH - RIGHT}"/>')

    def across(self, value: float) -> float:
        return LEFT + (value - self.x[0]) / (self.x[1] - self.x[0]) * (WIDTH - LEFT - RIGHT)

    def down(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.y[0]) / (self.y[1] - self.y[0]) * (HEIGHT - TOP - BOTTOM)

    def at(self, point: tuple[float, float]) -> str:
        return f"{self.across(point[0]):.1f} {self.down(point[1]):.1f}"

    def figure(self, title: str, labels: Sequence[tuple[str, str]]) -> Markup:
        """labels: (words, colour) of the legend; none for a single unnamed line."""
        legend = "".join(f'<span><i style="background:{colour}"></i>{escape(words)}</span>' for words, colour in labels)
        return Markup(
            f'<figure><figcaption>{escape(title)}</figcaption><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
            f'aria-label="{escape(title)}">{"".join(self.parts)}</svg><p class="legend">{legend}</p></figure>'
        )


def span(
    values: Sequence[float], ticks: int, *, whole: bool = False, tight: bool = False
) -> tuple[tuple[float, float], list[float]]:  # fmt: skip
    """(lowest and highest shown, ticks). A single value gets room on both sides."""
    low, high = min(values), max(values)
    if low == high:
        room = 1.0 if whole else abs(low) * 0.1 or 1.0
        low, high = low - room, high + room
    found = [float(tick) for tick in MaxNLocator(ticks, integer=whole).tick_values(low, high)]
    shown = (low, high) if tight else (min(found[0], low), max(found[-1], high))
    return shown, [tick for tick in found if shown[0] <= tick <= shown[1]]


def curves(title: str, lines: dict[str, list[Point]], errors: dict[str, list[Point]] | None = None) -> Markup | None:
    """One chart of named lines over steps; errors: half-widths of a line's bars. None when there is nothing to draw."""
    known = {name: [(x, y) for x, y in line if y is not None and math.isfinite(y)] for name, line in lines.items()}
    known = {name: line for name, line in known.items() if line}
    if not known:
        return None
    bars = {name: dict(errors[name]) for name in known if errors and name in errors}
    y = [value for name, line in known.items() for x, value in line]
    y += [value + sign * (bars[name].get(x) or 0) for name in bars for x, value in known[name] for sign in (-1, 1)]
    frame = Frame([x for line in known.values() for x, _ in line], y)
    labels = []
    for number, (name, line) in enumerate(known.items()):
        colour, dash = COLOURS[number % len(COLOURS)], DASHES[number // len(COLOURS) % len(DASHES)]
        labels.append((f"{name}  {short(line[0][1])} \u2192 {short(line[-1][1])}", colour))
        for x, value in line if name in bars else []:
            if half := bars[name].get(x):
                frame.parts.append(f'<path d="M{frame.at((x, value - half))}L{frame.at((x, value + half))}" '
                                   f'stroke="{colour}" stroke-opacity=".45" stroke-width="2"/>')  # fmt: skip
        draw_line(frame, lines[name] if len(line) <= DENSE else thinned(frame, line, colour), name, colour, dash)
    return frame.figure(title, labels)


def draw_line(frame: Frame, line: list[Point], name: str, colour: str, dash: str) -> None:
    """The line, broken where a value is missing, with its points where they are few."""
    pieces: list[list[tuple[float, float]]] = [[]]
    for x, y in line:
        if y is None or not math.isfinite(y):
            pieces.append([])
        else:
            pieces[-1].append((x, y))
    path = "".join("M" + "L".join(map(frame.at, piece)) for piece in pieces if piece)
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    frame.parts.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.6" stroke-linejoin="round"{dashes}>'
                       f"<title>{escape(name)}</title></path>")  # fmt: skip
    points = [point for piece in pieces for point in piece]
    for x, y in points if len(points) <= 40 else points[:: len(points) - 1]:
        frame.parts.append(f'<circle cx="{frame.across(x):.1f}" cy="{frame.down(y):.1f}" r="2.2" fill="{colour}">'
                           f"<title>{escape(name)} {short(y)} at {short(x)}</title></circle>")  # fmt: skip


def thinned(frame: Frame, line: list[tuple[float, float]], colour: str) -> list[Point]:
    """Means of runs of points; the band of their extremes is drawn."""
    size = math.ceil(len(line) / (DENSE // 2))
    runs = [line[place : place + size] for place in range(0, len(line), size)]
    middle = [(sum(x for x, _ in run) / len(run), [y for _, y in run]) for run in runs]
    top = [(x, max(ys)) for x, ys in middle]
    bottom = [(x, min(ys)) for x, ys in middle[::-1]]
    frame.parts.append(f'<path d="M{"L".join(map(frame.at, [*top, *bottom]))}Z" fill="{colour}" fill-opacity=".18"/>')
    return [(x, sum(ys) / len(ys)) for x, ys in middle]


def histogram(title: str, sets: dict[str, list[float]], bins: int = 24) -> Markup | None:
    """Shares by value, an outline for each set, over the same bins. None when there is nothing to draw."""
    sets = {name: values for name, values in sets.items() if values}
    if not sets:
        return None
    everything = [value for values in sets.values() for value in values]
    (low, high), _ = span(everything, 6, tight=True)
    width = (high - low) / bins
    shares = {}
    for name, values in sets.items():
        counts = [0] * bins
        for value in values:
            counts[min(bins - 1, int((value - low) / width))] += 1
        shares[name] = [count / len(values) for count in counts]
    frame = Frame([low, high], [share for one in shares.values() for share in one], whole_x=False, from_zero=True)
    labels = []
    for number, (name, one) in enumerate(shares.items()):
        colour = COLOURS[number % len(COLOURS)]
        labels.append((f"{name}  mean {short(sum(sets[name]) / len(sets[name]))}, n {len(sets[name]):,}", colour))
        corners = [(low + (place + side) * width, share) for place, share in enumerate(one) for side in (0, 1)]
        closed = [(low, 0.0), *corners, (high, 0.0)]
        frame.parts.append(f'<path d="M{"L".join(map(frame.at, closed))}Z" fill="{colour}" fill-opacity=".16" '
                           f'stroke="{colour}" stroke-width="1.4"><title>{escape(name)}</title></path>')  # fmt: skip
    return frame.figure(title, labels)
