"""Building policies by name, and errors that say what would have been right."""

from dataclasses import dataclass
from math import inf
from typing import Any, ClassVar

import pytest

from backends.catalog.views import BackendView, FleetView
from policies.facts import RequestFacts
from policies.pickers.chance_constrained import ChanceConstrained
from policies.pickers.cheapest import Cheapest
from policies.prices.drain_time import DrainTime
from policies.registry import (
    BUILT_IN,
    PartSpec,
    PolicyError,
    PolicySpec,
    Registry,
    build_learner,
    build_pipeline,
    describe,
)
from policies.spec import setting
from tests.policy_fleet import a_backend, a_request, choose


def names(parts: tuple[Any, ...]) -> list[str]:
    return [part.name for part in parts]


def test_the_default_policy_is_headrace() -> None:
    pipeline = build_pipeline(PolicySpec())
    assert pipeline.name == "headrace"
    assert names(pipeline.filters) == ["serves_model", "alive", "fits_context", "backing_off", "quality_floor"]
    assert names(pipeline.prices) == ["request_cost"]
    assert pipeline.picker == ChanceConstrained()
    assert pipeline.margin is None
    assert pipeline.lazy
    assert build_learner(PolicySpec()).name == "ccr"


@pytest.mark.parametrize("name", list(BUILT_IN.presets))
def test_every_preset_builds_under_its_name(name: str) -> None:
    assert build_pipeline(PolicySpec(name)).name == name


def test_settings_of_a_preset_reach_the_part_that_has_them() -> None:
    spec = PolicySpec("cheapest_feasible", settings={
        "margin": 1.5, "price_per_s": 0.01, "explore_share": 0, "stale_after_s": 5})
    pipeline = build_pipeline(spec)
    assert pipeline.margin == 1.5
    assert pipeline.prices[1] == DrainTime(price_per_s=0.01)
    assert pipeline.picker == Cheapest(explore_share=0.0, stale_after_s=5.0)


def test_a_policy_in_full() -> None:
    pipeline = build_pipeline(PolicySpec(
        name=None, filters=(PartSpec("serves_model"), PartSpec("alive")),
        prices=(PartSpec("request_cost", {"reference_batch": 4}), PartSpec("drain_time", {"price_per_s": 0.002})),
        picker=PartSpec("cheapest", {"explore_share": 0.02})))
    assert pipeline.name == "custom"
    assert names(pipeline.filters) == ["serves_model", "alive"]
    assert pipeline.prices[1] == DrainTime(price_per_s=0.002)
    assert pipeline.picker == Cheapest(explore_share=0.02)


def test_a_preset_with_one_part_replaced() -> None:
    pipeline = build_pipeline(PolicySpec("headrace", picker=PartSpec("p2c")))
    assert pipeline.name == "custom"
    assert names(pipeline.prices) == ["request_cost"]
    assert not pipeline.weighs
    assert pipeline.picker.name == "p2c"


@pytest.mark.parametrize(("spec", "path", "message"), [
    (PolicySpec("headrase"), ("name",), "there is no preset 'headrase'; did you mean 'headrace'?"),
    (PolicySpec(filters=(PartSpec("alive"), PartSpec("fit_context"))), ("filters", 1, "name"),
     "there is no filter 'fit_context'; did you mean 'fits_context'?"),
    (PolicySpec(prices=(PartSpec("zzz"),)), ("prices", 0, "name"),
     "there is no price 'zzz' (known: drain_time, lateness, request_cost)"),
    (PolicySpec(picker=PartSpec("cheapst")), ("picker", "name"), "did you mean 'cheapest'?"),
    (PolicySpec(prices=(PartSpec("drain_time", {"price_per_sec": 1.0}),)), ("prices", 0, "price_per_sec"),
     "price drain_time has no setting 'price_per_sec'; did you mean 'price_per_s'?"),
    (PolicySpec(prices=(PartSpec("drain_time", {"price_per_s": "cheap"}),)), ("prices", 0, "price_per_s"),
     "must be a finite number, got 'cheap'"),
    (PolicySpec(prices=(PartSpec("drain_time", {"price_per_s": inf}),)), ("prices", 0, "price_per_s"), "finite"),
    (PolicySpec(prices=(PartSpec("drain_time", {"price_per_s": True}),)), ("prices", 0, "price_per_s"), "finite"),
    (PolicySpec(prices=(PartSpec("request_cost", {"reference_batch": 1.5}),)), ("prices", 0, "reference_batch"),
     "must be a whole number, got 1.5"),
    (PolicySpec(prices=(PartSpec("request_cost", {"reference_batch": 0}),)), ("prices", 0, "reference_batch"),
     "must be at least 1, got 0"),
    (PolicySpec(picker=PartSpec("cheapest", {"first_request": 1})), ("picker", "first_request"),
     "must be true or false, got 1"),
    (PolicySpec("cheapest_feasible", settings={"explore_share": 2}), ("settings", "explore_share"),
     "must be at most 1, got 2"),
    (PolicySpec(settings={"margin": "two"}), ("settings", "margin"), "must be a finite number, got 'two'"),
    (PolicySpec("p2c", settings={"explore_share": 0.1}), ("settings", "explore_share"),
     "no part of this policy has a setting 'explore_share'"),
    (PolicySpec(filters=(PartSpec("alive"), PartSpec("alive"))), ("filters", 1, "name"), "'alive' is listed twice"),
])
def test_errors_say_where_and_what(spec: PolicySpec, path: tuple[str | int, ...], message: str) -> None:
    with pytest.raises(PolicyError) as caught:
        build_pipeline(spec)
    assert caught.value.path == path
    assert message in caught.value.message
    assert str(caught.value) == caught.value.message


def test_a_setting_that_two_parts_have_is_set_on_the_part() -> None:
    both = Registry(prices={"flat": Flat, "flat_too": type("FlatToo", (Flat,), {"name": "flat_too"})})
    spec = PolicySpec(prices=(PartSpec("flat"), PartSpec("flat_too")), settings={"per_request": 1.0})
    with pytest.raises(PolicyError, match="set it on the part"):
        build_pipeline(spec, BUILT_IN.joined_with(both))


@dataclass(frozen=True)
class Flat:
    """The same money for every request."""

    name: ClassVar[str] = "flat"
    per_request: float = setting(0.5, "Money per request.", at_least=0)

    def __call__(self, facts: RequestFacts, backend: BackendView, estimate: object, now: float) -> float:
        return self.per_request


@dataclass(frozen=True)
class Nobody:
    """Rejects everyone."""

    name: ClassVar[str] = "nobody"

    def __call__(self, facts: RequestFacts, backend: BackendView, fleet: FleetView, now: float) -> str | None:
        return "closed"


def test_parts_from_outside_join_the_same_table() -> None:
    registry = BUILT_IN.joined_with(Registry(filters={"nobody": Nobody}, prices={"flat": Flat}))
    priced = build_pipeline(PolicySpec(prices=(PartSpec("flat", {"per_request": 2.0}),)), registry)
    assert choose(priced, a_request(), a_backend()).price == 2.0
    closed = build_pipeline(PolicySpec(filters=(PartSpec("nobody"),)), registry)
    assert choose(closed, a_request(), a_backend()).reason == "no backend: closed 1"
    assert "flat" not in BUILT_IN.prices


def test_nobody_replaces_a_part_silently() -> None:
    with pytest.raises(ValueError, match="filter alive is registered twice"):
        BUILT_IN.joined_with(Registry(filters={"alive": Nobody}))


def test_describe_has_a_row_for_everything() -> None:
    rows = {(row.kind, row.name): row for row in describe()}
    tables = (("filter", BUILT_IN.filters), ("price", BUILT_IN.prices), ("picker", BUILT_IN.pickers),
              ("preset", BUILT_IN.presets))
    assert set(rows) == {(kind, name) for kind, table in tables for name in table}
    for row in rows.values():
        assert row.doc.endswith(".")
        assert all(each.doc and each.type in ("float", "int", "bool", "str") for each in row.settings)
    preset = {each.name: each.default for each in rows["preset", "headrace"].settings}
    assert preset == {"margin": None, "floor_bits": 0.0, "reference_batch": 32, "miss_value": 12.0, "stickiness": 1.05,
                      "patience_ttft_s": 10.0, "patience_inter_token_s": 0.25, "first_request": True, "sample": 64}


@pytest.mark.parametrize("name", list(BUILT_IN.presets))
def test_every_documented_setting_of_a_preset_can_be_set(name: str) -> None:
    row = next(row for row in describe() if (row.kind, row.name) == ("preset", name))
    settings = {each.name: each.default for each in row.settings if each.default is not None}
    assert build_pipeline(PolicySpec(name, settings=settings)) == build_pipeline(PolicySpec(name))
