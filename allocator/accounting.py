"""What was used, in normalised units, under a named version: the same bytes each time it is asked.

    charged units · s = Σ devices · seconds · coefficient(card, family, version)

The world keeps device-milliseconds as whole numbers by (queue, card, family, version), so a sum does not depend on its
order. A statement under the versions that the runs were charged with is the bill; under another version it is a
re-costing, and says so.
"""

from dataclasses import dataclass

from allocator.model.world import World
from allocator.units.table import Coefficients


@dataclass(frozen=True, slots=True)
class Line:
    queue: str
    card: str
    family: str
    coefficients: str
    """The version that it is costed under."""
    device_s: float
    unit_s: float


def statement(world: World, now_s: float, table: Coefficients | None = None) -> tuple[Line, ...]:
    """What each queue has used until now, live runs included; under `table` where one is given."""
    used_ms = dict(world.served_ms)
    for run in world.runs.values():
        key = (run.queue, run.card, run.family, run.coefficients)
        used_ms[key] = used_ms.get(key, 0) + len(run.devices) * max(0, round((now_s - run.started_s) * 1000.0))
    by_line: dict[tuple[str, str, str, str], tuple[int, float]] = {}
    for (queue, card, family, version), milliseconds in sorted(used_ms.items()):
        cost = table or world.tables[version]
        line = (queue, card, family, cost.version)
        before_ms, _ = by_line.get(line, (0, 0.0))
        total_ms = before_ms + milliseconds
        by_line[line] = (total_ms, total_ms * cost.coefficient(card, family) / 1000.0)
    return tuple(Line(*key, total_ms / 1000.0, unit_s) for key, (total_ms, unit_s) in by_line.items())
