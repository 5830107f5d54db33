"""Charts as inline SVG, by hand: nothing to install, nothing to load, colours from the page's CSS.

Colours come by class: ``c-eager``, ``c-stock``, ``c-rtc``, ``c-before``, ``c-after``. All sizes are
in units of the viewBox, which is ``WIDTH`` wide.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 960


@dataclass(frozen=True)
class Series:
    """``values``: one a chunk, from chunk ``first`` on."""

    label: str
    css: str
    values: Sequence[float]
    first: int = 0


@dataclass(frozen=True)
class Bar:
    """``text`` stands behind the bar; ``low`` and ``high`` are the ends of a whisker."""

    label: str
    css: str
    value: float
    text: str
    low: float | None = None
    high: float | None = None


def ticks(top: float, count: int = 5) -> list[float]:
    """Round numbers from 0 up to at most ``top``, about ``count`` of them."""
    if not top > 0:
        return [0.0]
    raw = top / count
    power = 10 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    return [i * step for i in range(int(top / step + 1e-9) + 1)]


def _number(x: float) -> str:
    return f"{x:,.6g}"


def _text(x: float, y: float, text: str, css: str = "", anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" class="{css}" text-anchor="{anchor}">{escape(text)}</text>'
    )


def _line(x1: float, y1: float, x2: float, y2: float, css: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{css}"/>'


def _svg(height: float, title: str, body: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(title)}">'
        f"<title>{escape(title)}</title>{''.join(body)}</svg>"
    )


def step_chart(series: Sequence[Series], resets: Sequence[int], title: str) -> str:
    """Step time in ms over chunks, a dot a chunk; ``resets``: chunks marked as position resets.

    The axis starts at 0. An outlier far above the rest is drawn at the upper edge as a triangle,
    with its value in the tooltip, so that it does not flatten everything else.
    """
    height, left, right, top, bottom = 340, 64, 16, 34, 52
    everything = sorted(v for s in series for v in s.values)
    if not everything:
        return ""
    cap = 1.35 * everything[int(0.97 * (len(everything) - 1))]
    limit = min(everything[-1] * 1.08, cap)
    last = max(s.first + len(s.values) for s in series) - 1
    first = min(s.first for s in series)

    def x(i: float) -> float:
        return left + (WIDTH - left - right) * (i - first + 0.5) / (last - first + 1)

    def y(v: float) -> float:
        return top + (height - top - bottom) * (1 - v / limit)

    body = []
    for t in ticks(limit):
        body.append(_line(left, y(t), WIDTH - right, y(t), "grid"))
        body.append(_text(left - 8, y(t) + 4, _number(t), "tick", "end"))
    for t in ticks(last, 10):
        if t >= first and t == int(t):
            body.append(_text(x(t), height - bottom + 18, _number(t), "tick", "middle"))
    for r in resets:
        if first <= r <= last:
            body.append(_line(x(r), top - 6, x(r), height - bottom, "reset"))
            body.append(_text(x(r), top - 12, f"reset, chunk {r}", "note", "middle"))
    for s in series:
        for i, v in enumerate(s.values):
            tip = f"<title>{escape(s.label)}, chunk {s.first + i}: {v:.1f} ms</title>"
            cx = x(s.first + i)
            if v > limit:
                points = f"{cx - 4:.1f},{top + 8} {cx + 4:.1f},{top + 8} {cx:.1f},{top}"
                body.append(f'<polygon points="{points}" class="dot {s.css}">{tip}</polygon>')
            else:
                size, mark = (5.5, "at ") if s.first + i in resets else (2.6, "")
                at = f'cx="{cx:.1f}" cy="{y(v):.1f}" r="{size}"'
                body.append(f'<circle {at} class="dot {mark}{s.css}">{tip}</circle>')
    body.append(_line(left, height - bottom, WIDTH - right, height - bottom, "axis"))
    body.append(_text((left + WIDTH - right) / 2, height - 10, "chunk", "label", "middle"))
    body.append(_text(8, 16, "step time, ms", "label"))
    return _svg(height, title, body)


def bar_chart(bars: Sequence[Bar], axis: str, title: str, label_width: int = 190) -> str:
    """Horizontal bars from 0, with whiskers where given; ``axis`` names quantity and unit."""
    if not bars:
        return ""
    row, left, right, bottom = 44, label_width, 260, 46
    height = row * len(bars) + bottom + 6
    limit = max(max(b.value, b.high or 0) for b in bars) or 1.0

    def x(v: float) -> float:
        return left + (WIDTH - left - right) * v / limit

    body = []
    for t in ticks(limit):
        body.append(_line(x(t), 4, x(t), height - bottom, "grid"))
        body.append(_text(x(t), height - bottom + 17, short(t), "tick", "middle"))
    for k, b in enumerate(bars):
        y = 6 + row * k
        body.append(_text(left - 10, y + 24, b.label, "name", "end"))
        tip = f"<title>{escape(b.label)}: {escape(b.text)}</title>"
        width = max(x(b.value) - left, 1.5)
        body.append(
            f'<rect x="{left}" y="{y + 6}" width="{width:.1f}" height="{row - 16}" rx="3" '
            f'class="bar {b.css}">{tip}</rect>'
        )
        end = x(b.value)
        if b.low is not None and b.high is not None:
            mid = y + 6 + (row - 16) / 2
            body.append(_line(x(b.low), mid, x(b.high), mid, "whisker"))
            body += [_line(x(v), mid - 5, x(v), mid + 5, "whisker") for v in (b.low, b.high)]
            end = max(end, x(b.high))
        body.append(_text(end + 10, y + 24, b.text, "value"))
    body.append(_line(left, 4, left, height - bottom, "axis"))
    body.append(_text((left + WIDTH - right) / 2, height - 8, axis, "label", "middle"))
    return _svg(height, title, body)


def short(n: float) -> str:
    """Axis numbers: 20 M rather than 20,000,000."""
    for size, unit in ((1e9, " G"), (1e6, " M"), (1e4, " k")):
        if abs(n) >= size:
            return f"{_number(n / (1e3 if unit == ' k' else size))}{unit}"
    return _number(n)


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """(label, css class) pairs, as HTML."""
    items = "".join(f'<li><i class="{css}"></i>{escape(label)}</li>' for label, css in entries)
    return f'<ul class="legend">{items}</ul>'
