"""Normalised units: the shipped table, its fallbacks, what is refused, and what drifts."""

from dataclasses import replace
from math import inf, nan
from pathlib import Path
from statistics import median

import pytest

from allocator.accounting import statement
from allocator.events import CoefficientsActivated
from allocator.units.load import load, shipped
from allocator.units.table import BadCoefficients, CardUnits, Coefficients, check, drift
from tests.allocator_worlds import a_job, a_node, a_stage

JOB_TYPES = [family for family in shipped().speeds if "(" in family or family in ("A3C", "CycleGAN")]


def a_table(version: str = "t1", **given: object) -> Coefficients:
    table = Coefficients(version, "v100", "test", {"v100": CardUnits(1.0), "k80": CardUnits(0.25, 2.0)},
                         {"LM": {"v100": {1: 1.0}, "k80": {1: 0.2, 4: 0.6}}}, {})
    return replace(table, **given)  # type: ignore[arg-type]


def test_the_shipped_table_is_gavels() -> None:
    table = shipped()
    assert len(JOB_TYPES) == 26
    ratios = [1 / table.coefficient("k80", family) for family in JOB_TYPES]
    assert (round(min(ratios), 2), round(max(ratios), 2)) == (0.66, 11.63)
    assert table.speed("v100", "LM (batch size 5)", 8) == pytest.approx(698.77 / 109.17, rel=1e-4)
    assert table.speed("v100", "LM (batch size 5)", 8, spread_out=True) == pytest.approx(73.12 / 109.17, rel=1e-3)


def test_a_key_of_card_and_family_charges_closer_than_a_scalar() -> None:
    """The reason for the pair: over the job types, one scalar a card is off by a median of 1.66, the family by 1.15."""
    table = shipped()

    def off(estimate: float, truth: float) -> float:
        return max(estimate / truth, truth / estimate)

    truths = {family: table.coefficient("k80", family) for family in JOB_TYPES}
    by_scalar = [off(table.scalar("k80"), truth) for truth in truths.values()]
    by_family = [off(table.coefficient("k80", family.split(" (")[0]), truth) for family, truth in truths.items()]
    by_count = [off(1.0, truth) for truth in truths.values()]
    assert median(by_count) == pytest.approx(4.05, abs=0.01)
    assert median(by_scalar) == pytest.approx(1.66, abs=0.05)
    assert median(by_family) == pytest.approx(1.15, abs=0.01)


def test_an_unmeasured_family_falls_back() -> None:
    table = a_table()
    assert table.coefficient("k80", "LM (batch size 7)") == 0.2
    assert table.coefficient("k80", "GPT") == 0.25
    assert table.speed("k80", "LM", 2) == pytest.approx(0.4)
    assert table.speed("k80", "LM", 8) == pytest.approx(1.2)
    assert table.speed("k80", "GPT", 2) == pytest.approx(0.5)


def test_P68_an_unknown_card_is_worth_nothing_and_never_used() -> None:
    assert shipped().coefficient("V100-SXM2", "LM") == 0.0
    assert not shipped().knows("V100-SXM2")


def test_a_measured_zero_means_that_the_card_cannot() -> None:
    assert shipped().speed("k80", "ResNet-50 (batch size 128)", 2) == 0.0


@pytest.mark.parametrize("scalar", [0.0, -1.0, nan, inf, 1e6])
def test_P68_values_that_cannot_be_are_refused(scalar: float) -> None:
    with pytest.raises(BadCoefficients, match="card k80: scalar"):
        check(a_table(cards={"v100": CardUnits(1.0), "k80": CardUnits(scalar)}))


def test_P68_a_family_on_an_alias_is_refused() -> None:
    with pytest.raises(BadCoefficients, match="is it an alias"):
        check(a_table(speeds={"LM": {"K80-12GB": {1: 0.2}}}))


def test_all_faults_are_told_at_once() -> None:
    with pytest.raises(BadCoefficients) as told:
        check(a_table(version="", cards={"v100": CardUnits(2.0, 0.5)}, speeds={"LM": {"v100": {0: nan}}}))
    for part in ("version", "scalar 1", "spread 0.5", "a gang of 0"):
        assert part in str(told.value)


def test_a_file_that_is_no_table_says_where(tmp_path: Path) -> None:
    path = tmp_path / "units.json"
    with pytest.raises(BadCoefficients, match=r"units\.json: No such file"):
        load(str(path))
    path.write_text('{"version": "x"}')
    with pytest.raises(BadCoefficients, match=r"units\.json.*reference"):
        load(str(path))


def test_F18_drift_is_told_and_changes_nothing() -> None:
    active = a_table()
    fresh = a_table("t2", cards={"v100": CardUnits(1.0), "k80": CardUnits(0.24)},
                    speeds={"LM": {"v100": {1: 1.0}, "k80": {1: 0.3}}})
    assert drift(active, fresh) == ("LM on k80: 0.2 in t1, 0.3 in t2",)
    assert drift(active, active) == ()
    assert "no longer" in drift(active, a_table(cards={"v100": CardUnits(1.0)}))[0]


def test_F11_a_run_is_charged_by_the_version_it_began_under() -> None:
    stage = a_stage(a_node("n", "k80"))
    stage.submit_and_tick(a_job("old", cards=("k80",), family="LM"))
    fresh = replace(shipped(), version="fresh", cards={**shipped().cards, "k80": CardUnits(0.5)}, speeds={})
    stage.happens(CoefficientsActivated(at_s=10.0, table=fresh))
    stage.now_s = 10.0
    stage.submit_and_tick(a_job("new", cards=("k80",), family="LM"))
    stage.now_s = 100.0
    stage.ends("old").ends("new")
    old, new = sorted(statement(stage.world, 100.0), key=lambda line: line.coefficients, reverse=True)
    assert (old.coefficients, old.device_s) == ("gavel-c4fa400", 100.0)
    assert old.unit_s == pytest.approx(100.0 * shipped().coefficient("k80", "LM"))
    assert (new.coefficients, new.device_s, new.unit_s) == ("fresh", 90.0, 45.0)


def test_I10_a_statement_is_the_same_each_time_and_recosts_on_demand() -> None:
    stage = a_stage(a_node("n", "k80"))
    stage.submit_and_tick(a_job("a", gang=2, cards=("k80",), family="LM"), a_job("b", cards=("k80",), family="A3C"))
    stage.now_s = 77.7
    stage.ends("a")
    assert statement(stage.world, 80.0) == statement(stage.world, 80.0)
    recosted = statement(stage.world, 80.0, replace(shipped(), version="flat", speeds={}))
    assert {line.coefficients for line in recosted} == {"flat"}
    assert [line.device_s for line in recosted] == [line.device_s for line in statement(stage.world, 80.0)]
    assert [line.unit_s for line in recosted] != [line.unit_s for line in statement(stage.world, 80.0)]


def test_the_version_in_force_cannot_change_its_values() -> None:
    stage = a_stage(a_node("n"))
    changed = replace(shipped(), cards={**shipped().cards, "k80": CardUnits(0.5)})
    assert "needs a new version" in stage.refused(CoefficientsActivated(at_s=0.0, table=changed))
    without = replace(shipped(), version="x", reference="p100", cards={"p100": CardUnits(1.0)}, speeds={},
                      spread_out={})
    assert "do not know v100" in stage.refused(CoefficientsActivated(at_s=0.0, table=without))
