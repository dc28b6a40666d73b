"""Two charts as SVG, drawn without a library: payload beside the entropies, encode rate beside the roofline.

Both axes are logarithmic. The rows are those of codec.py; only `llm` is drawn, or else the first workload.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Protocol

WIDTH, HEIGHT, MARGIN = 520, 400, 60
COLOURS = ("#1b6ca8", "#c8553d", "#588157", "#7b4b94", "#8d6e0f", "#3d5a80", "#9d0208", "#555555")

Line = list[tuple[float, float]]


class Row(Protocol):
    metric: str
    workload: str
    density: float
    variant: str
    threads: int
    value: float


def draw(rows: Sequence[Row]) -> str:
    """The charts beside each other."""
    names = [row.workload for row in rows]
    chosen = "llm" if "llm" in names else names[0]
    rows = [row for row in rows if row.workload == chosen and row.threads == 1 and row.value == row.value]
    payload = _lines(rows, "percent_of_dense")
    changed = dict(_lines(rows, "changed_share").get("", []))
    for variant, line in _lines(rows, "bytes_per_change").items():
        if variant.startswith("limit"):
            payload[variant] = [(density, 100 * value * changed[density] / 2) for density, value in line]
    rate = _lines(rows, "encode_share_of_memcpy") | {"roofline": _lines(rows, "read_share_of_memcpy").get("", [])}
    charts = [
        _chart(payload, f"{chosen}: payload, % of dense", 0),
        _chart(rate, f"{chosen}: encode, share of memcpy", WIDTH),
    ]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{2 * WIDTH}" height="{HEIGHT}" '
    style = 'font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="white"/>'
    return f"{head}{style}{''.join(charts)}</svg>\n"


def _lines(rows: Sequence[Row], metric: str) -> dict[str, Line]:
    lines: dict[str, Line] = {}
    for row in rows:
        if row.metric == metric:
            lines.setdefault(row.variant, []).append((row.density, row.value))
    return lines


def _chart(lines: dict[str, Line], title: str, left: int) -> str:
    points = [point for line in lines.values() for point in line]
    if not points:
        return ""
    (low_x, high_x), (low_y, high_y) = _range([x for x, _ in points]), _range([y for _, y in points])

    def place(x: float, y: float) -> tuple[float, float]:
        across = (math.log(x) - math.log(low_x)) / (math.log(high_x) - math.log(low_x))
        up = (math.log(y) - math.log(low_y)) / (math.log(high_y) - math.log(low_y))
        return (left + MARGIN + across * (WIDTH - 3 * MARGIN), HEIGHT - MARGIN - up * (HEIGHT - 2 * MARGIN))

    parts = [f'<text x="{left + MARGIN}" y="24" font-size="14">{escape(title)} over density</text>']
    for x in sorted({x for x, _ in points}):
        at, _ = place(x, low_y)
        parts.append(f'<text x="{at:.1f}" y="{HEIGHT - MARGIN + 18}" text-anchor="middle">{100 * x:g} %</text>')
        parts.append(f'<path d="M{at:.1f} {MARGIN}V{HEIGHT - MARGIN}" stroke="#ddd"/>')
    for y in _ticks(low_y, high_y):
        at, up = place(low_x, y)
        parts.append(f'<text x="{at - 6:.1f}" y="{up + 4:.1f}" text-anchor="end">{y:g}</text>')
        parts.append(f'<path d="M{at:.1f} {up:.1f}H{left + WIDTH - 2 * MARGIN}" stroke="#ddd"/>')
    for (name, line), colour in zip(lines.items(), COLOURS * 3, strict=False):
        if not line:
            continue
        corners = [place(x, y) for x, y in sorted(line)]
        dash = ' stroke-dasharray="5 3"' if name.startswith(("limit", "roofline")) else ""
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in corners)
        parts.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.6"{dash}/>')
        x, y = corners[-1]
        parts.append(f'<text x="{x + 5:.1f}" y="{y + 4:.1f}" fill="{colour}">{escape(name)}</text>')
    return "".join(parts)


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low * 0.8, high * 1.25)


def _ticks(low: float, high: float) -> list[float]:
    steps = [mantissa * 10.0**power for power in range(-4, 4) for mantissa in (1, 2, 5)]
    return [step for step in steps if low <= step <= high]
