"""Forecasts cover what comes, capacities follow the closed form, and who is spared leaves enough behind."""

import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allocator.lendable import Demand, supply_of
from backends.catalog.spec import Coefficients
from loadtest.tide import Wave
from policies.facts import Budget
from policies.forecast.capacity import capacity_per_s
from policies.forecast.forecaster import Forecaster, Outlook, Step, judged, largest_until
from policies.forecast.mix import ClassMix, Mix, Moments
from policies.forecast.outlooks import EwmaLevel, SeasonalNaive
from policies.forecast.spare import Standing, spare

SEASON = 96


def wave(bin_index: int, rng: Random) -> float:
    """A day of 96 bins, noisy, between about 2 and 10 requests a second."""
    return max(0.0, 6.0 - 4.0 * math.cos(2.0 * math.pi * bin_index / SEASON) + rng.gauss(0.0, 0.5))


def learned(outlook: Outlook, bins: int, *, horizon_bins: int = 12, seed: int = 1) -> tuple[Forecaster, Random]:
    rng = Random(seed)
    forecaster = Forecaster(outlook, bin_s=60.0, horizon_s=60.0 * horizon_bins)
    for index in range(bins):
        forecaster.learn(wave(index, rng))
    return forecaster, rng


def test_nothing_is_known_before_a_whole_season() -> None:
    forecaster, _ = learned(SeasonalNaive(SEASON, 60.0), SEASON)
    assert forecaster.steps() == ()
    assert learned(SeasonalNaive(SEASON, 60.0), SEASON + 20)[0].steps()[0].in_s == 0.0


def test_the_season_is_seen_coming_and_the_quantile_covers_what_comes() -> None:
    covered = asked = 0
    wide = 0.0
    for seed in range(3):
        forecaster, rng = learned(SeasonalNaive(SEASON, 60.0), 3 * SEASON, seed=seed)
        for index in range(3 * SEASON, 5 * SEASON):
            ahead = forecaster.steps()[8].per_s
            truth = 6.0 - 4.0 * math.cos(2.0 * math.pi * (index + 8) / SEASON)
            covered, asked = covered + (ahead >= truth), asked + 1
            wide += ahead / truth
            forecaster.learn(wave(index, rng))
    assert covered / asked > 0.97
    assert wide / asked < 1.8, "a forecast of everything covers everything"


@pytest.mark.parametrize("seed", range(4))
def test_the_luck_of_a_quiet_night_is_not_carried_to_the_crest(seed: int) -> None:
    """Five to thirty requests a bin: what holds for hundreds would triple the crest by the luck of one bin."""
    rng = Random(seed)
    wave_of_few = Wave(trough_per_s=1.4, peak_per_s=7.2, period_s=60.0)
    forecaster = Forecaster(SeasonalNaive(15, 4.0), bin_s=4.0, horizon_s=16.0)
    arrivals = Counter(int(at_s // 4.0) for at_s in wave_of_few.arrivals(rng, 240.0))
    over = []
    for index in range(60):
        steps = forecaster.steps()
        if steps:
            truth = max(wave_of_few.rate_per_s(4.0 * index + seconds) for seconds in range(20))
            over.append((largest_until(steps, 16.0) or 0.0) / truth)
        forecaster.learn(arrivals[index] / 4.0)
    assert max(over) < 3.2
    assert 1.2 < sum(over) / len(over) < 2.2


def test_few_requests_say_little_of_todays_level() -> None:
    outlook = SeasonalNaive(10, 60.0)
    for index in range(20):
        outlook.learn(1.0 / 60.0 if index % 10 < 5 else 1.0)
    before = outlook.expected(5)
    outlook.learn(4.0 / 60.0)       # four requests instead of one
    after = outlook.expected(4)
    assert before is not None
    assert after is not None
    assert after < 1.2 * before


@pytest.mark.parametrize("nightly", [0.0, 1.0], ids=["none", "one a season"])
def test_demand_where_there_was_none_in_any_season_is_not_forecast_as_none(nightly: float) -> None:
    """Days of quiet, then traffic: nothing may be lent as if it did not come."""
    forecaster = Forecaster(SeasonalNaive(SEASON, 60.0), bin_s=60.0, horizon_s=720.0)
    for index in range(20 * SEASON):
        forecaster.learn(nightly / 60.0 if index % SEASON == 7 else 0.0)
    for _ in range(12):
        forecaster.learn(10.0)
    assert all(step.per_s > 9.0 for step in forecaster.steps())


def test_what_a_level_explains_is_no_surplus() -> None:
    twice, alike = SeasonalNaive(SEASON, 60.0), SeasonalNaive(SEASON, 60.0)
    for index in range(2 * SEASON):
        demand = 6.0 - 4.0 * math.cos(2.0 * math.pi * index / SEASON)
        alike.learn(demand)
        twice.learn(demand if index < 2 * SEASON - 20 else 2.0 * demand)
    for ahead in (0, SEASON // 2):
        assert twice.expected(ahead) == pytest.approx(2.0 * (alike.expected(ahead) or 0.0), rel=0.05)


def test_the_trough_is_forecast_low_and_the_ramp_after_it_high() -> None:
    forecaster, _ = learned(SeasonalNaive(SEASON, 60.0), 3 * SEASON - 12, horizon_bins=48)
    steps = forecaster.steps()
    assert steps[12].per_s < 0.6 * steps[48].per_s
    assert largest_until(steps, 0.0) == steps[0].per_s
    assert largest_until(steps, 48 * 60.0) == max(step.per_s for step in steps)
    assert largest_until((), 60.0) is None


def test_a_level_learns_from_its_errors_how_far_waves_rise() -> None:
    steady = Forecaster(EwmaLevel(), bin_s=60.0, horizon_s=720.0)
    rng = Random(4)
    for _ in range(400):
        steady.learn(6.0 + rng.gauss(0.0, 0.5))
    waving, _ = learned(EwmaLevel(), 400)
    assert steady.steps()[-1].per_s < 8.5
    at_level = waving.steps()
    assert at_level[-1].per_s > 1.5 * at_level[0].per_s


def test_another_quantile_may_be_asked_for_the_farther_the_lower() -> None:
    forecaster, _ = learned(SeasonalNaive(SEASON, 60.0), 4 * SEASON)
    usual, asked = forecaster.steps(), forecaster.steps(lambda in_s: 0.99 if in_s < 300.0 else 0.5)
    assert asked[:5] == usual[:5]
    assert all(median.per_s < high.per_s for median, high in zip(asked[5:], usual[5:], strict=True))


@pytest.mark.parametrize("make", [lambda: SeasonalNaive(SEASON, 60.0), EwmaLevel])
def test_what_was_learned_is_kept_over_a_restart(make: Callable[[], Outlook]) -> None:
    before, rng = learned(make(), 3 * SEASON)
    after = Forecaster(make(), bin_s=60.0, horizon_s=720.0)
    after.restore(json.loads(json.dumps(before.export())), age_s=20.0)
    assert after.steps() == before.steps()
    for index in range(3 * SEASON, 4 * SEASON):
        per_s = wave(index, rng)
        before.learn(per_s)
        after.learn(per_s)
    assert [step.per_s for step in after.steps()] == pytest.approx([step.per_s for step in before.steps()], rel=0.1)


def test_a_state_without_deviations_restores_its_seasons() -> None:
    """As files of before have it, which kept ratios."""
    before, _ = learned(SeasonalNaive(SEASON, 60.0), 3 * SEASON)
    saved = before.export()
    saved["errors"] = saved.pop("deviations")
    after = Forecaster(SeasonalNaive(SEASON, 60.0), bin_s=60.0, horizon_s=720.0)
    after.restore(json.loads(json.dumps(saved)), age_s=0.0)
    unlearnt = Forecaster(SeasonalNaive(SEASON, 60.0), bin_s=60.0, horizon_s=720.0)
    unlearnt.restore({**saved, "deviations": {}}, age_s=0.0)
    assert after.steps() == unlearnt.steps() != ()


def test_bins_that_were_missed_move_the_season_on() -> None:
    before, _ = learned(SeasonalNaive(SEASON, 60.0), 3 * SEASON)      # the trough
    after = Forecaster(SeasonalNaive(SEASON, 60.0), bin_s=60.0, horizon_s=720.0)
    after.restore(before.export(), age_s=60.0 * SEASON / 2)
    assert after.steps()[0].per_s > 3.0 * before.steps()[0].per_s, "half a season later is the crest"


def test_a_gap_longer_than_what_was_learned_is_no_endless_work() -> None:
    before, _ = learned(SeasonalNaive(SEASON, 60.0), 3 * SEASON)
    after = Forecaster(SeasonalNaive(SEASON, 60.0), bin_s=60.0, horizon_s=720.0)
    after.restore(before.export(), age_s=1e9)
    assert len(after.export()["outlook"]["per_s"]) <= 8 * SEASON


def test_a_quiet_night_divides_by_no_zero() -> None:
    forecaster = Forecaster(SeasonalNaive(10, 60.0), bin_s=60.0, horizon_s=300.0)
    for _ in range(300):
        forecaster.learn(0.0)
    assert all(step.per_s == 0.0 for step in forecaster.steps())


def test_old_seasons_are_forgotten_without_a_jump() -> None:
    outlook = SeasonalNaive(10, 60.0)
    for index in range(500):
        outlook.learn(float(index % 10))
        expected = outlook.expected(0)
        assert expected is None or 0.0 <= expected <= 9.0
    assert len(outlook._sums) <= 81


@pytest.mark.parametrize(("last", "horizons"), [(1, (0, 1)), (40, (0, 2, 5, 10, 20, 40))])
def test_the_horizons_that_are_judged(last: int, horizons: tuple[int, ...]) -> None:
    assert judged(last) == horizons


CARD = Coefficients("v", "s", prefill_base_ms=9.0, prefill_ms_per_token=0.04, prefill_ms_per_pair=1e-6,
                    decode_base_ms=10.0, decode_ms_per_seq=0.05, decode_ms_per_seq_token=4e-5)
CHAT = Moments(600.0, 600.0**2, 150.0, 600.0 * 150.0, 150.0**2)


def mix_of(budget: Budget, moments: Moments = CHAT) -> tuple[ClassMix, ...]:
    return (ClassMix(1.0, budget, moments),)


def test_capacity_is_where_the_mean_pace_meets_the_budget() -> None:
    rate = capacity_per_s(CARD, None, 1.0, mix_of(Budget(inter_token_s=0.04)), 1.0)
    assert rate is not None
    # At that rate, by Little's law, `n` streams decode at 40 ms a token while prompts take their share of the time.
    streams = rate * 150.0 * 0.040
    step_ms = 10.0 + streams * (0.05 + 4e-5 * (600.0 + 75.0))
    rho = rate * (0.04 * 600.0 + 1e-6 * 600.0**2 / 2.0) / 1000.0
    assert step_ms / (1.0 - rho) == pytest.approx(40.0, rel=1e-6)


@given(drift=st.floats(0.2, 5.0), pace_ms=st.floats(11.0, 400.0), target=st.floats(0.1, 1.0))
def test_capacity_shrinks_with_drift_and_grows_with_the_budget(drift: float, pace_ms: float, target: float) -> None:
    def at(drift: float, pace_ms: float) -> float:
        found = capacity_per_s(CARD, 64, drift, mix_of(Budget(inter_token_s=pace_ms / 1000.0)), target)
        assert found is not None
        return found

    assert at(drift * 1.1, pace_ms) <= at(drift, pace_ms) <= at(drift, pace_ms * 1.1)


def test_what_cannot_be_kept_even_alone_is_no_capacity() -> None:
    assert capacity_per_s(CARD, None, 1.0, mix_of(Budget(inter_token_s=0.009)), 0.7) == 0.0
    assert capacity_per_s(CARD, None, 1.0, mix_of(Budget(ttft_s=0.02)), 0.7) == 0.0
    assert capacity_per_s(CARD, None, 5.0, mix_of(Budget(inter_token_s=0.045)), 0.7) == 0.0
    assert capacity_per_s(CARD, None, 1.0, (), 0.7) is None


def test_slots_and_memory_bound_what_nothing_else_bounds() -> None:
    free = capacity_per_s(CARD, None, 1.0, mix_of(Budget()), 1.0)
    few = capacity_per_s(CARD, 4, 1.0, mix_of(Budget()), 1.0)
    small = capacity_per_s(replace(CARD, kv_capacity_tokens=3_000), None, 1.0, mix_of(Budget()), 1.0)
    assert free is not None
    assert few is not None
    assert small is not None
    assert few < free
    assert few == pytest.approx(small, rel=0.1), "3,000 tokens hold about four of these requests"
    # Four streams whose prompts share the engine with them: each takes D steps and the others' prefill.
    step_ms = 10.0 + 4 * (0.05 + 4e-5 * 675.0)
    rho = few * (0.04 * 600.0 + 1e-6 * 600.0**2 / 2.0) / 1000.0
    assert few * 150.0 * step_ms / 1000.0 / (1.0 - rho) == pytest.approx(4.0, rel=1e-6), "Little's law"


def test_a_budget_to_the_end_is_a_pace_too() -> None:
    paced = capacity_per_s(CARD, None, 1.0, mix_of(Budget(ttft_s=1.0, inter_token_s=0.04)), 0.7)
    ended = capacity_per_s(CARD, None, 1.0, mix_of(Budget(ttft_s=1.0, e2e_s=1.0 + 149 * 0.04)), 0.7)
    assert paced == pytest.approx(ended)


def test_a_mix_adds_up_and_follows_the_traffic() -> None:
    mix = Mix()
    assert mix.classes({}) == ()
    for _ in range(50):
        mix.learn("chat", 600, 150)
        mix.learn("bulk", 2000, 400)
    chat, bulk = mix.classes({"chat": Budget(ttft_s=1.0)})
    assert chat.moments == pytest.approx(CHAT)
    assert (chat.budget.ttft_s, bulk.budget.ttft_s) == (1.0, None)
    assert chat.share + bulk.share == pytest.approx(1.0)
    for _ in range(1_000):
        mix.fade()
        mix.learn("bulk", 2000, 400)
    (left,) = mix.classes({})
    assert left.share == pytest.approx(1.0)
    assert left.moments.prompt_output == pytest.approx(800_000.0)


def alike(count: int, away: int = 0, capacity_per_s: float | None = 2.0) -> list[Standing]:
    return [Standing(f"b{index}", capacity_per_s, index < away, index >= away, 3.0, 60.0)
            for index in range(count)]


FORECASTS = st.lists(st.floats(0.0, 30.0), min_size=1, max_size=30)


@given(count=st.integers(2, 10), per_s=FORECASTS, headroom=st.integers(0, 2), data=st.data())
def test_on_backends_all_alike_it_is_the_allocators_own_arithmetic(
    count: int, per_s: list[float], headroom: int, data: st.DataObject
) -> None:
    away = data.draw(st.integers(0, count - 1))
    steps = [Step(60.0 * index, demand) for index, demand in enumerate(per_s)]
    found = spare(alike(count, away), steps, loan_horizon_s=1800.0, grace_s=60.0, headroom_replicas=headroom)
    supply = supply_of("p", "h100", count, [Demand(*step) for step in steps], 2.0, headroom,
                       loan_horizon_s=1800.0, recall_lead_s=120.0)
    assert supply is not None
    assert len(found.lendable) == min(count - 1, supply.lendable)
    assert len(found.may_stay_away) == min(count - 1, max(0, supply.spare))
    assert found.lendable <= found.may_stay_away


UNLIKE = st.lists(st.tuples(st.floats(0.0, 9.0) | st.none(), st.booleans(), st.floats(0.1, 9.0)), min_size=1,
                  max_size=8)


@given(drawn=UNLIKE, demand=st.floats(0.0, 30.0))
def test_what_stays_at_home_carries_the_demand(drawn: list[tuple[float | None, bool, float]], demand: float) -> None:
    fleet = [Standing(f"b{index}", capacity, away, not away, price, 10.0)
             for index, (capacity, away, price) in enumerate(drawn)]
    found = spare(fleet, [Step(0.0, demand)], loan_horizon_s=60.0, grace_s=1.0, headroom_replicas=0)
    at_home = [one for one in fleet if one.name not in found.lendable]
    if found.lendable:
        assert sum(one.carries_per_s for one in at_home) >= demand - 1e-6
    if any(not one.is_away for one in fleet):
        assert any(not one.is_away for one in at_home), "the last one was spared"


def test_those_that_are_away_stay_in_the_answer() -> None:
    at_home = spare(alike(4), [Step(0.0, 3.0)], loan_horizon_s=60, grace_s=1, headroom_replicas=0)
    assert len(at_home.lendable) == 2
    fleet = [replace(one, is_away=one.name == "b3", serves=one.name != "b3") for one in alike(4)]
    assert "b3" in spare(fleet, [Step(0.0, 3.0)], loan_horizon_s=60, grace_s=1, headroom_replicas=0).lendable


def test_the_dearest_goes_first_and_unknown_is_neither_lent_nor_counted() -> None:
    fleet = [Standing("dear", 4.0, False, True, 9.0, 5.0), Standing("cheap", 4.0, False, True, 1.0, 5.0),
             Standing("blank", None, False, True, 1.0, 5.0)]
    found = spare(fleet, [Step(0.0, 3.0)], loan_horizon_s=60, grace_s=1, headroom_replicas=0)
    assert found.lendable == {"dear"}
    assert found.capacity_per_s == 8.0


def test_without_a_forecast_nothing_is_lent_and_nobody_called_back() -> None:
    found = spare(alike(3, away=1), (), loan_horizon_s=60, grace_s=1, headroom_replicas=1)
    assert found.lendable == frozenset()
    assert found.may_stay_away == {"b0"}
    assert found.surplus_per_s is None
