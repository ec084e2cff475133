"""docs/metrics.md has one heading for every metric, and none for a metric that is gone."""

import re
from pathlib import Path

from router.fleet import Fleet
from router.metrics import FleetCollector, LedgerCollector, Metrics

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "metrics.md"


def test_every_metric_has_its_heading_and_no_heading_is_stale() -> None:
    metrics = Metrics()
    metrics.registry.register(FleetCollector(Fleet()))
    metrics.registry.register(LedgerCollector())
    exported = {
        family.name + ("_total" if family.type == "counter" else "") for family in metrics.registry.collect()
    }
    headings = re.findall(r"^### `(\w+)`$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(headings) == sorted(exported)
