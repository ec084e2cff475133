"""How much may be lent, and the flow of offers: hysteresis, withdrawal, recall for lack of slack, giving back."""

from math import nan
from typing import Any

import pytest

from allocator.apply import apply
from allocator.effects import EffectKind, outstanding
from allocator.events import (
    ClaimMade,
    JobCancelled,
    LoanGivenBack,
    LoanOffered,
    LoanRecalled,
    LoanWithdrawn,
    RunPlaced,
    SupplyReported,
    from_json,
    to_json,
)
from allocator.invariants import step_violations
from allocator.lendable import Demand, needed_replicas, supply_of
from allocator.lending import JOBS_OFFERED_TO, recall, staying
from allocator.loan.states import LoanState
from allocator.model.inventory import Kept, Supply
from allocator.queueing.bench import why
from allocator.reasons import Reason
from tests.allocator_worlds import Stage, a_config, a_job, a_node, a_stage, lent_stage, only


def figures(forecast: list[tuple[float, float]], healthy: int = 10, per_replica: float | None = 2.0) -> Supply | None:
    return supply_of("inference", "v100", healthy, [Demand(*step) for step in forecast], per_replica, 1,
                     loan_horizon_s=1800.0, recall_lead_s=120.0)


def test_the_peak_within_each_window_decides() -> None:
    """10 replicas, 1 of headroom, 2 requests/s each: 4/s need 2, 9/s after a minute 5, 15/s after ten minutes 8."""
    found = figures([(0.0, 4.0), (60.0, 9.0), (600.0, 15.0), (4000.0, 20.0)])
    assert found == Supply("inference", "v100", lendable=1, spare=4)


def test_a_demand_over_capacity_lends_nothing_and_calls_back() -> None:
    found = figures([(0.0, 30.0)])
    assert found is not None
    assert (found.lendable, found.spare) == (0, -6)


def test_rounding_needs_no_further_replica() -> None:
    assert needed_replicas(0.3 * 3, 0.3) == 3
    assert needed_replicas(0.0, 0.3) == 0


@pytest.mark.parametrize(("forecast", "per_replica"), [
    ([], 2.0), ([(0.0, 1.0)], None), ([(0.0, 1.0)], 0.0), ([(0.0, nan)], 2.0), ([(60.0, 1.0)], 2.0)])
def test_unknown_is_not_zero_demand(forecast: list[tuple[float, float]], per_replica: float | None) -> None:
    assert figures(forecast, per_replica=per_replica) is None


def test_an_offer_is_never_recalled_by_the_forecast_that_it_was_made_on() -> None:
    found = figures([(0.0, 4.0), (300.0, 13.0)])
    assert found is not None
    assert found.lendable <= found.spare


def lender(**rules: Any) -> Stage:
    return a_stage(a_node("t", "k80"), a_node("i0", pool="inference"), a_node("i1", pool="inference"), backends=4,
                   config=a_config(**rules))


def test_a_surplus_is_offered_once_it_has_held() -> None:
    stage = lender(surplus_hold_s=100.0).supply(2)
    assert only(LoanOffered, stage.submit_and_tick(a_job("j", gang=8))) == []
    stage.now_s = 60.0
    stage.supply(1).supply(2)
    assert only(LoanOffered, stage.tick(100.0)) == [], "only one of the two replicas was spare all the time"
    assert len(only(LoanOffered, stage.tick(160.0))) == 2


def test_stale_news_offers_nothing() -> None:
    stage = lender(supply_fresh_s=60.0).supply(2)
    stage.now_s = 61.0
    assert only(LoanOffered, stage.submit_and_tick(a_job("j", gang=4))) == []


def test_nobody_waits_so_nothing_is_offered() -> None:
    assert lender().supply(2).tick() == []


def test_those_who_have_no_loan_to_hope_for_do_not_keep_it_from_those_behind_them() -> None:
    """Before the one job that a replica would do for wait many that no lender has a card for, or too few of."""
    stage = a_stage(a_node("t", "k80", devices=4), a_node("i", pool="inference"), a_node("j", pool="inference"),
                    backends=1).supply(4)
    stage.submit_and_tick(a_job("runs", cards=("k80",), gang=4))
    stage.submit(*(a_job(f"k80 {index}", cards=("k80",)) for index in range(JOBS_OFFERED_TO)),
                 *(a_job(f"large {index}", gang=8) for index in range(JOBS_OFFERED_TO)), a_job("small"))
    assert [event.claim.job for event in only(ClaimMade, stage.tick(1.0))] == ["small"]


def test_no_more_is_offered_than_the_gang_needs() -> None:
    assert len(only(LoanOffered, lender().supply(2).submit_and_tick(a_job("j", gang=3)))) == 1


def test_I11_no_more_is_offered_than_is_lendable() -> None:
    stage = lender().supply(1)
    assert only(LoanOffered, stage.submit_and_tick(a_job("j", gang=8), a_job("k", gang=8))) == []
    assert len(only(LoanOffered, stage.submit_and_tick(a_job("l", gang=4), a_job("m", gang=4)))) == 1


def test_I11_what_is_away_counts_against_what_may_be() -> None:
    stage = lent_stage(2, gang=4)
    stage.supply(1)
    assert only(LoanOffered, stage.submit_and_tick(a_job("k", gang=4))) == []
    stage.supply(2)
    assert len(only(LoanOffered, stage.tick(11.0))) == 1
    stage.submit_and_tick(a_job("l", gang=4))
    assert len(stage.world.loans) == 2


def test_a_gang_starts_when_all_its_offers_are_released() -> None:
    stage = lender().supply(2)
    stage.submit_and_tick(a_job("j", gang=8))
    drains = [effect for effect in outstanding(stage.world) if effect.kind is EffectKind.DRAIN]
    assert len(drains) == 2
    assert stage.pending("j").value == "claim"
    stage.obey()
    (placed,) = only(RunPlaced, stage.tick(5.0))
    assert placed.why.reason is Reason.CLAIM_READY
    assert {loan.state for loan in stage.world.loans.values()} == {LoanState.LENT}


def test_an_offer_ends_with_its_time_or_with_the_surplus() -> None:
    stage = lender(offer_ttl_s=100.0).supply(2)
    stage.submit_and_tick(a_job("j", gang=4))
    stage.supply(0)
    (gone,) = only(LoanWithdrawn, stage.tick(1.0))
    assert gone.why.reason is Reason.SURPLUS_GONE
    assert stage.world.loans == {}
    assert stage.world.claims == {}

    stage.supply(2).tick(2.0)
    assert len(stage.world.loans) == 1
    (late,) = only(LoanWithdrawn, stage.supply(0, 2).tick(102.0))
    assert late.why.reason is Reason.OFFER_EXPIRED


def test_a_cancelled_job_wants_no_offer() -> None:
    from allocator.events import JobCancelled
    stage = lender().supply(2)
    stage.submit_and_tick(a_job("j", gang=4))
    (gone,) = only(LoanWithdrawn, stage.happens(JobCancelled(at_s=1.0, job="j")).tick(1.0))
    assert gone.why.reason is Reason.NOT_WANTED


def test_too_little_slack_recalls_the_difference() -> None:
    stage = lent_stage(3, gang=4)
    stage.submit_and_tick(a_job("k", gang=4), a_job("l", gang=4))
    stage.obey().tick()
    stage.obey(EffectKind.START)
    assert len(stage.runs()) == 3
    stage.supply(0, spare=2)
    (recalled,) = only(LoanRecalled, stage.tick(20.0))
    assert recalled.why.reason is Reason.SLACK_NEGATIVE
    assert recalled.deadline_s == 80.0
    # The demand goes on falling short of hope: one more, not all again.
    stage.supply(0, spare=1)
    assert len(only(LoanRecalled, stage.tick(21.0))) == 1


def two_cards() -> Stage:
    """One job stands on a V100 replica; the same pool has a K80 one. A surplus has to hold for 100 s, and has."""
    stage = a_stage(a_node("large", devices=1, pool="inference"), a_node("small", "k80", devices=1, pool="inference"),
                    backends=1, config=a_config(surplus_hold_s=100.0))
    stage.supply(1).supply(1, card="k80")
    stage.now_s = 100.0
    stage.submit_and_tick(a_job("j", cards=("v100", "k80"), work_unit_s=5000.0))
    stage.obey().tick()
    stage.obey(EffectKind.START)
    assert stage.runs() == {"j": "v100"}
    return stage


def test_who_is_called_back_is_not_sent_straight_to_a_smaller_replica() -> None:
    stage = two_cards()
    stage.now_s = 200.0
    stage.supply(0)
    assert len(only(LoanRecalled, stage.tick())) == 1
    stage.leave().tick(210.0)
    offers = [stage.now_s for at_s in range(211, 320, 10) if only(LoanOffered, stage.tick(float(at_s)))]
    assert offers == [301.0]


def test_a_surplus_that_goes_on_shrinking_costs_the_job_one_recall_and_not_two() -> None:
    stage = two_cards()
    stage.now_s = 200.0
    events = stage.supply(0).tick()
    stage.leave()
    for at_s in range(210, 260, 10):
        events += stage.tick(float(at_s))
        stage.obey()
    stage.supply(0, card="k80")
    for at_s in range(260, 400, 10):
        events += stage.tick(float(at_s))
    assert [event.loan for event in only(LoanRecalled, events)] == ["large-0"]


def test_what_an_operator_takes_back_says_nothing_of_the_surplus() -> None:
    stage = two_cards()
    stage.now_s = 200.0
    (home,) = recall(stage.world, 200.0, staying(stage.world, "inference", "v100"), 1, Reason.OPERATOR)
    stage.happens(home).tick()
    stage.leave()
    assert [event.loan.id for event in only(LoanOffered, stage.tick(201.0))] == ["small-0"]


def siblings(lent: int = 1) -> Stage:
    """So many of two replicas are lent to one job each; the router can spare both, and more jobs wait for them."""
    stage = a_stage(a_node("i", devices=2, pool="inference"), backends=1,
                    config=a_config(surplus_hold_s=100.0, recall_keep_s=1000.0)).supply(2)
    stage.now_s = 100.0
    for index in range(lent):
        stage.submit_and_tick(a_job(f"j{index}", work_unit_s=50_000.0))
        stage.obey().tick()
        stage.obey(EffectKind.START)
    return stage


def taken_back(stage: Stage, reason: Reason = Reason.OPERATOR, name: str = "i-0") -> Stage:
    """One loan is called back by hand, its job leaves and waits again."""
    loan = stage.loan(name)
    stage.happens(LoanRecalled(at_s=stage.now_s, loan=name, epoch=loan.epoch, deadline_s=stage.now_s + 60.0,
                               by_hand=True, why=why(stage.world, reason))).tick()
    return stage.leave().obey(EffectKind.PROBE).obey(EffectKind.SERVE)


def offers_until(stage: Stage, until_s: float) -> list[float]:
    """When something was offered; the lender goes on saying that it can spare two."""
    found = []
    for at_s in range(int(stage.now_s) + 20, int(until_s) + 1, 20):
        stage.now_s = float(at_s)
        stage.supply(2)
        found += [stage.now_s for _ in only(LoanOffered, stage.tick())]
    return found


@pytest.mark.parametrize("reason", [Reason.OPERATOR, Reason.P99_EMERGENCY])
def test_what_is_recalled_by_hand_is_not_undone_with_its_sibling(reason: Reason) -> None:
    stage = taken_back(siblings(), reason)
    assert stage.world.loans == {}
    assert offers_until(stage, 1090.0) == []
    assert offers_until(stage, 1100.0) == [1100.0]
    stage.replays()


def test_what_a_recall_by_hand_leaves_out_may_be_out() -> None:
    """Of two lent ones one is recalled; when the other has come home, one may go again, whichever."""
    stage = taken_back(siblings(2))
    assert list(stage.world.loans) == ["i-1"]
    assert offers_until(stage, 300.0) == []
    stage.happens(JobCancelled(at_s=300.0, job="j0")).ends("j1").tick(340.0)
    stage.obey()
    assert stage.world.loans == {}
    stage.submit(a_job("next"), a_job("and next"))
    assert len(offers_until(stage, 400.0)) == 1
    stage.replays()


def test_a_second_recall_lowers_what_may_be_out_and_begins_the_time_anew() -> None:
    stage = taken_back(siblings(2))
    stage.now_s = 600.0
    taken_back(stage, name="i-1")
    stage.supply(2)
    assert offers_until(stage, 1580.0) == []
    assert offers_until(stage, 1600.0) == [1600.0, 1600.0]


def test_who_says_by_hand_what_can_be_spared_ends_it_once_the_surplus_has_held() -> None:
    stage = taken_back(siblings())
    stage.happens(SupplyReported(at_s=120.0, supply=Supply("inference", "v100", 2, 2), by_hand=True))
    assert offers_until(stage, 200.0) == [200.0]
    stage.replays()


def test_an_offer_that_is_called_back_is_kept_too() -> None:
    stage = siblings(0)
    stage.submit_and_tick(a_job("j"))
    (loan,) = stage.world.loans.values()
    stage.happens(LoanRecalled(at_s=100.0, loan=loan.id, epoch=loan.epoch, deadline_s=160.0,
                               by_hand=True, why=why(stage.world, Reason.OPERATOR)))
    stage.tick()
    stage.obey()
    assert offers_until(stage, 1090.0) == []


def test_a_recall_of_a_journal_from_before_anything_was_kept_keeps_nothing() -> None:
    """What was offered soon after it was in order then, and is for an audit now."""
    stage = siblings()
    loan = stage.loan("i-0")
    given = LoanRecalled(at_s=stage.now_s, loan="i-0", epoch=loan.epoch, deadline_s=stage.now_s + 60.0, by_hand=True,
                         why=why(stage.world, Reason.OPERATOR))
    text = to_json(given)
    old = from_json(text.replace(b',"by_hand":true', b""))
    assert from_json(text) == given
    assert isinstance(old, LoanRecalled)
    assert not old.by_hand
    stage.happens(old).tick()
    stage.leave().obey(EffectKind.PROBE).obey(EffectKind.SERVE)
    assert stage.world.kept == {}
    assert offers_until(stage, 300.0) != []


def test_the_soak_would_see_an_offer_of_what_is_kept() -> None:
    stage = siblings()
    world = stage.world.evolved(kept={("inference", "v100"): Kept(1, 1000.0)}, supplies={})
    stage.submit(a_job("next"))
    stage.now_s = 200.0
    (offer,) = only(LoanOffered, stage.supply(2).tick())
    after = apply(world, offer)
    assert "may be after a recall by hand" in " ".join(fault.detail for fault in step_violations(world, offer, after))


def test_an_idle_loan_goes_home() -> None:
    stage = lent_stage(1, gang=4)
    stage.now_s = 100.0
    stage.ends("j")
    assert stage.tick(129.0) == []
    (back,) = only(LoanGivenBack, stage.tick(130.0))
    assert back.why.reason is Reason.IDLE
    assert stage.loan().state is LoanState.RETURNING
    stage.obey()
    assert stage.world.loans == {}
    assert {backend.state.value for backend in stage.world.backends.values()} == {"released"}
    stage.obey()
    assert {backend.state.value for backend in stage.world.backends.values()} == {"serving"}
    stage.replays()


def test_the_next_job_may_have_an_idle_loan() -> None:
    stage = lent_stage(1, gang=4)
    stage.submit_and_tick(a_job("next", gang=2))
    assert stage.pending("next").value == "devices_busy"
    stage.now_s = 100.0
    stage.ends("j")
    assert len(only(RunPlaced, stage.tick(101.0))) == 1
    assert stage.loan().idle_since_s is None


def test_a_job_that_cannot_save_its_work_borrows_only_within_the_promise() -> None:
    stage = lender(promised_min_s=1000.0).supply(2)
    events = stage.submit_and_tick(a_job("long", gang=4, checkpoint=None, work_unit_s=8000.0))
    assert only(LoanOffered, events) == []
    events = stage.submit_and_tick(a_job("short", gang=4, checkpoint=None, work_unit_s=3600.0))
    assert len(only(LoanOffered, events)) == 1


def test_a_loan_that_is_mostly_restart_is_not_worth_it() -> None:
    from allocator.model.jobs import Checkpoint
    stage = lender(promised_min_s=1000.0).supply(2)
    slow = Checkpoint(None, 10.0, restart_s=700.0)
    assert only(LoanOffered, stage.submit_and_tick(a_job("j", gang=4, checkpoint=slow, work_unit_s=1e6))) == []
