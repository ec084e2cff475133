"""docs/metrics.md has one heading for every metric, and none for a metric that is gone."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from router.config.sections import LendingSection
from router.fleet.feedback import Faults
from router.fleet.live import Fleet
from router.lending.report import LendingCollector, LendingDesk
from router.record.metrics import ClassCollector, FleetCollector, LedgerCollector, Metrics

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "metrics.md"


def test_every_metric_has_its_heading_and_no_heading_is_stale() -> None:
    metrics = Metrics()
    fleet = Fleet()
    metrics.registry.register(FleetCollector(fleet))
    config: Any = SimpleNamespace(models=(), latency_classes=(), lending=LendingSection())
    metrics.registry.register(ClassCollector(fleet, Faults(), dict, lambda: config))
    metrics.registry.register(LedgerCollector())
    metrics.registry.register(LendingCollector(LendingDesk(fleet, config, lambda: 0.0)))
    exported = {
        family.name + ("_total" if family.type == "counter" else "") for family in metrics.registry.collect()
    }
    headings = re.findall(r"^### `(\w+)`$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(headings) == sorted(exported)
