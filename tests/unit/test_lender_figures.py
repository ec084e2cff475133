"""From a publication to the numbers that are lent by, and no loan that flaps."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allocator.events import LoanOffered
from allocator.lender.figures import Figures, Steady, figures
from allocator.lender.publication import BadPublication, Published, read
from allocator.model.jobs import Checkpoint
from policies.forecast.forecaster import Step
from policies.forecast.spare import Standing, spare
from tests.allocator_worlds import a_config, a_job, a_node, a_stage, only


def published(name: str, capacity_per_s: float | None = 2.0, *, stage: str = "serving", lendable: bool = False,
              may_stay_away: bool | None = None) -> Published:
    return Published(name, stage, 0, 0, lendable, lendable if may_stay_away is None else may_stay_away, 5.0,
                     capacity_per_s)


def test_on_replicas_all_alike_it_is_the_number_of_names() -> None:
    found = figures([published("a", lendable=True), published("b", lendable=True), published("c")])
    assert found == Figures(2, 2)


def test_only_so_many_count_as_may_go_whichever_they_are() -> None:
    # The router can do without the two small ones; were the allocator to take the large one, that alone would be more.
    small = [published("s1", 1.0, lendable=True), published("s2", 1.0, lendable=True)]
    assert figures([*small, published("large", 3.0)]) == Figures(0, 0)
    assert figures([*small, published("large", 2.0)]) == Figures(1, 1)


def test_those_that_are_away_are_known_to_be_and_the_rest_assumed_large() -> None:
    away = published("small", 1.0, stage="released", lendable=True)
    assert figures([away, published("large", 3.0)]) == Figures(1, 1)
    assert figures([away, published("large", 3.0, lendable=True)]) == Figures(2, 2)
    wanted = published("small", 1.0, stage="released", lendable=False)
    assert figures([wanted, published("large", 3.0, lendable=False)]) == Figures(0, 0)


BACKENDS = st.lists(st.tuples(st.floats(0.1, 9.0), st.booleans(), st.booleans()), min_size=1, max_size=7)


@given(drawn=BACKENDS, rng=st.randoms(use_true_random=False))
def test_whichever_are_taken_no_more_is_missing_than_was_agreed_to(
    drawn: list[tuple[float, bool, bool]], rng: Random
) -> None:
    backends = [published(f"b{index}", capacity, stage="released" if away else "serving", lendable=named)
                for index, (capacity, away, named) in enumerate(drawn)]
    count = figures(backends).lendable
    away = [one for one in backends if one.stage != "serving"]
    taken = away[:count] + rng.sample([one for one in backends if one.stage == "serving"], max(0, count - len(away)))
    agreed = sum(one.capacity_per_s or 0.0 for one in backends if one.lendable)
    if len(away) <= count:
        assert sum(one.capacity_per_s or 0.0 for one in taken) <= agreed + 1e-5
    assert count <= sum(one.lendable for one in backends)


def test_what_does_not_last_does_not_count() -> None:
    steady = Steady(5.0)
    assert steady.after(Figures(2, 2), 0.0) == Figures(2, 2)
    assert steady.after(Figures(2, 0), 1.0) == Figures(2, 2), "a dip recalls nothing"
    assert steady.after(Figures(2, 2), 2.0) == Figures(2, 2)
    assert steady.after(Figures(0, 0), 3.0) == Figures(0, 2), "what is gone is not lent, at once"
    assert steady.after(Figures(3, 3), 7.9) == Figures(0, 3)
    assert steady.after(Figures(3, 3), 8.1) == Figures(3, 3)
    for at_s in range(20, 30):
        found = steady.after(Figures(0, 0), float(at_s))
    assert found == Figures(0, 0), "a want that lasts is one"


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=40))
def test_steady_never_lends_more_nor_calls_back_sooner_than_what_was_found(seen: list[tuple[int, int]]) -> None:
    steady = Steady(3.0)
    for at_s, (lendable, more) in enumerate(seen):
        found = steady.after(Figures(lendable, lendable + more), float(at_s))
        assert found.lendable <= lendable
        assert found.spare >= lendable + more


def loans_over_ten_minutes(hold_s: float, surplus_hold_s: float) -> int:
    """Offers made while the demand wobbles about the point where one of three replicas can just be spared."""
    stage = a_stage(a_node("t", "k80"), *(a_node(f"i{index}", pool="inference") for index in range(3)), backends=4,
                    config=a_config(surplus_hold_s=surplus_hold_s, grace_s=10.0, max_recalls=1000))
    stage.submit(a_job("j", gang=4, work_unit_s=1e6, checkpoint=Checkpoint(None, 1.0, restart_s=1.0)))
    steady, rng, offers = Steady(hold_s), Random(7), 0
    for second in range(1, 601):
        stage.now_s = float(second)
        away = set(stage.world.loans)
        standings = [Standing(name, 2.0, name in away, name not in away, 1.0, 5.0) for name in stage.world.backends]
        found = spare(standings, [Step(0.0, rng.gauss(3.9, 0.2))], loan_horizon_s=60.0, grace_s=10.0,
                      headroom_replicas=0)
        seen = [published(one.name, 2.0, stage="released" if one.is_away else "serving",
                          lendable=one.name in found.lendable, may_stay_away=one.name in found.may_stay_away)
                for one in standings]
        stage.supply(*steady.after(figures(seen), stage.now_s))
        offers += len(only(LoanOffered, stage.tick()))
        stage.obey()
    return offers


def test_a_demand_at_the_threshold_makes_no_loan_flap() -> None:
    flapping = loans_over_ten_minutes(0.0, 0.0)
    held = loans_over_ten_minutes(5.0, 30.0)
    assert flapping > 20, "the demand does not wobble; this shows nothing"
    assert held <= 2


@pytest.mark.parametrize("body", [b"", b"[]", b'{"version": "x", "backends": []}', b'{"version": 1}'])
def test_what_is_no_publication_is_refused(body: bytes) -> None:
    with pytest.raises(BadPublication):
        read(body)
