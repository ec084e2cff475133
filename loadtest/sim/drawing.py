"""Small SVG charts without scripts or links: points, lines, and moments marked on a time line. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 720, 300
LEFT, RIGHT, TOP, BOTTOM = 56, 170, 14, 40
COLOURS = ("#0b6e75", "#d1782f", "#7a4fa3", "#3f7d3a", "#b3364a", "#57708c", "#a08a1f", "#1f6fb5", "#8c5a3c", "#5b5b5b")
TICKS = 5

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Axes:
    """The visible range, and what stands beside it."""

    x: tuple[float, float]
    y: tuple[float, float]
    x_title: str
    y_title: str
    y_percent: bool = False

    def at(self, point: Point) -> Point:
        """Where a point lies on the drawing; what is out of range lies on its edge."""
        across, up = _share(point[0], self.x), _share(point[1], self.y)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)


def _share(value: float, span: tuple[float, float]) -> float:
    low, high = span
    return min(1.0, max(0.0, (value - low) / (high - low))) if high > low else 0.5


def points(named: Mapping[str, Point], axes: Axes) -> str:
    """One labelled dot a name."""
    drawn = []
    for number, (name, point) in enumerate(named.items()):
        x, y = axes.at(point)
        drawn.append(f"<circle cx='{x:.1f}' cy='{y:.1f}' r='5' fill='{_colour(number)}'><title>{escape(name)}: "
                     f"{point[0]:.4g}, {point[1]:.4g}</title></circle>")
    return _frame("".join(drawn), list(named), axes)


def lines(named: Mapping[str, Sequence[Point]], axes: Axes, marks: Mapping[str, float] | None = None) -> str:
    """One line a name; `marks` are moments on the x axis."""
    drawn = []
    for name, at in (marks or {}).items():
        x, _ = axes.at((at, axes.y[0]))
        drawn.append(f"<line x1='{x:.1f}' y1='{TOP}' x2='{x:.1f}' y2='{HEIGHT - BOTTOM}' stroke='#c0392b' "
                     f"stroke-dasharray='4 3'/><text x='{x + 3:.1f}' y='{TOP + 10}' class='mark'>{escape(name)}</text>")
    for number, series in enumerate(named.values()):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(axes.at, series))
        drawn.append(f"<polyline points='{path}' fill='none' stroke='{_colour(number)}' stroke-width='1.8'/>")
    return _frame("".join(drawn), list(named), axes)


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _frame(inside: str, names: Sequence[str], axes: Axes) -> str:
    drawn = [f"<svg role='img' width='{WIDTH}' height='{HEIGHT}' viewBox='0 0 {WIDTH} {HEIGHT}'>",
             f"<title>{escape(axes.y_title)} against {escape(axes.x_title)}</title>"]
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    for tick in range(TICKS + 1):
        share = tick / TICKS
        y = bottom - share * (bottom - TOP)
        value = axes.y[0] + share * (axes.y[1] - axes.y[0])
        label = f"{100 * value:.3g} %" if axes.y_percent else f"{value:.3g}"
        drawn.append(f"<line x1='{LEFT}' y1='{y:.1f}' x2='{right}' y2='{y:.1f}' stroke='#e3e8ee'/>"
                     f"<text x='{LEFT - 6}' y='{y + 4:.1f}' text-anchor='end'>{label}</text>")
        x = LEFT + share * (right - LEFT)
        drawn.append(f"<text x='{x:.1f}' y='{bottom + 16}' text-anchor='middle'>"
                     f"{axes.x[0] + share * (axes.x[1] - axes.x[0]):.3g}</text>")
    drawn.append(f"<text x='{(LEFT + right) / 2:.0f}' y='{HEIGHT - 6}' text-anchor='middle'>{escape(axes.x_title)}"
                 "</text>")
    drawn.append(inside)
    for number, name in enumerate(names):
        y = TOP + 8 + 17 * number
        drawn.append(f"<rect x='{right + 12}' y='{y - 8}' width='10' height='10' rx='2' fill='{_colour(number)}'/>"
                     f"<text x='{right + 27}' y='{y + 1}'>{escape(name)}</text>")
    return "".join(drawn) + "</svg>"
