"""Who is next: order, backfill, reclaim, kinds and windows. Named after the field cases that they settle."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allocator.effects import EffectKind
from allocator.events import (
    ClaimMade,
    ConfigLoaded,
    JobCancelled,
    KillOrdered,
    LoanOffered,
    NodeDown,
    RunPlaced,
    StopOrdered,
)
from allocator.model.jobs import Checkpoint, JobState, Kind, Level, Outcome, Window
from allocator.model.pools import Pool, PoolKind, Quota
from allocator.plan import survey
from allocator.reasons import Pending, Reason
from tests.allocator_worlds import (
    CHECKPOINT,
    INFERENCE,
    TRAINING,
    Stage,
    a_config,
    a_job,
    a_node,
    a_queue,
    a_stage,
    only,
)


def one_node(devices: int = 4, **rules: Any) -> Stage:
    return a_stage(a_node("n", devices=devices), config=a_config(**rules))


def placed(events: Sequence[object]) -> list[str]:
    return [event.run.job for event in events if isinstance(event, RunPlaced)]


# --- order -----------------------------------------------------------------------------------------------------------


def test_priority_then_age() -> None:
    stage = one_node(2)
    stage.submit(a_job("z, the oldest"), a_job("low", priority=-1))
    stage.now_s = 1.0
    stage.submit(a_job("urgent", priority=5), a_job("new"))
    assert placed(stage.tick()) == ["urgent", "z, the oldest"]


def test_a_guarantee_before_borrowing() -> None:
    stage = a_stage(a_node("n"), config=a_config(a_queue("a", v100=1), a_queue("b", v100=3)))
    stage.submit(a_job("a1", "a"), a_job("a2", "a", priority=9), a_job("b1", "b"), a_job("b2", "b", 2))
    stage.tick()
    assert sorted(stage.runs()) == ["a2", "b1", "b2"]


def test_between_borrowers_the_smaller_share_in_units_is_next() -> None:
    """a has borrowed four K80, b two V100: less compute for a, though more cards. One V100 is left."""
    stage = a_stage(a_node("k", "k80", 4), a_node("v", "v100", 3), config=a_config(a_queue("a"), a_queue("b")))
    stage.submit_and_tick(a_job("a0", "a", 4, cards=("k80",)), a_job("b0", "b", 2))
    stage.submit(a_job("b1", "b"), a_job("z of a", "a"))
    assert placed(stage.tick()) == ["z of a"]


def test_P64_a_job_that_cannot_be_taken_stops_nobody() -> None:
    stage = one_node()
    stage.submit(a_job("lost", "nowhere", priority=9), a_job("alien", cards=("b200",), priority=9), a_job("fine"))
    assert placed(stage.tick()) == ["fine"]
    assert stage.pending("lost") is Pending.QUEUE_UNKNOWN
    assert stage.pending("alien") is Pending.CARD_UNKNOWN


def test_P58_a_head_that_can_never_fit_is_set_aside_with_a_reason() -> None:
    stage = one_node()
    stage.submit(a_job("huge", gang=64, priority=9), a_job("fine"))
    assert placed(stage.tick()) == ["fine"]
    assert stage.pending("huge") is Pending.GANG_TOO_LARGE
    assert "needs 64 v100, the pool has 4" in stage.why("huge").sentence


def test_P58_a_more_urgent_job_takes_its_own_queues_devices_behind_a_huge_head() -> None:
    stage = one_node()
    stage.submit_and_tick(a_job("low", gang=4))
    stage.submit(a_job("huge", gang=64, priority=20), a_job("high", gang=2, priority=10))
    events = stage.tick(1.0)
    assert [event.why.reason for event in only(StopOrdered, events)] == [Reason.PRIORITY]
    stage.leave().tick(2.0)
    assert "high" in stage.runs()


def test_P58_the_second_card_type_is_tried_too() -> None:
    """high runs on card 1, low on card 2: medium takes card 2 from low."""
    stage = a_stage(a_node("v", devices=1), a_node("p", "p100", devices=1))
    stage.submit_and_tick(a_job("high", priority=10))
    stage.submit_and_tick(a_job("low", cards=("p100",), priority=0))
    stage.now_s = 1.0
    events = stage.submit_and_tick(a_job("medium", cards=("v100", "p100"), priority=5))
    assert [event.run for event in only(StopOrdered, events)] == [stage.run_of("low").id]
    stage.leave().tick(2.0)
    assert stage.runs() == {"high": "v100", "medium": "p100"}


def test_a_job_set_aside_does_not_rank_those_behind_it() -> None:
    """a's head would borrow and is too large for the pool: who is behind it keeps to the guarantee and goes before an
    older borrower all the same."""
    stage = two_free_devices()
    stage.submit(a_job("huge", "a", 64), a_job("small", "a"))
    assert placed(stage.tick(1.0)) == ["small"]
    assert stage.pending("huge") is Pending.GANG_TOO_LARGE


def test_a_job_outside_of_its_window_does_not_rank_those_behind_it() -> None:
    stage = two_free_devices()
    minute = int(stage.world.wall_s(0.0) // 60 % 1440)
    closed = Window((minute + 60) % 1440, (minute + 120) % 1440)
    stage.submit(a_job("night", "a", 2, windows=(closed,)), a_job("small", "a"))
    assert placed(stage.tick(1.0)) == ["small"]
    assert stage.pending("night") is Pending.WINDOW_CLOSED


def two_free_devices() -> Stage:
    """One of the two is guaranteed to a; an older job of b wants to borrow both."""
    stage = a_stage(a_node("n", devices=2), config=a_config(a_queue("a", v100=1), a_queue("b")))
    stage.submit(a_job("borrower", "b", 2))
    stage.now_s = 0.5
    return stage


def test_a_gang_that_no_quota_ever_lets_in_keeps_no_devices_from_those_behind_it() -> None:
    """a lends nobody its four of eight devices, so b will never have six, whoever ends."""
    stage = a_stage(a_node("n", devices=8),
                    config=a_config(a_queue("a", v100=Quota(4.0, lending_limit=0.0)), a_queue("b")))
    stage.submit_and_tick(a_job("runs", "a", 2, work_unit_s=2000.0))
    stage.submit_and_tick(a_job("runs too", "b", work_unit_s=900.0))
    stage.submit(a_job("never", "b", 6), a_job("fine", "b", work_unit_s=5000.0))
    assert placed(stage.tick()) == ["fine"]
    assert stage.pending("never") is Pending.QUOTA_LIMIT
    stage.submit_and_tick(a_job("could one day", "b", 4))
    assert stage.pending("could one day") is not Pending.QUOTA_LIMIT


def test_a_gang_that_no_quota_lets_in_while_nodes_are_down_waits_for_them() -> None:
    stage = a_stage(a_node("n"), a_node("m"),
                    config=a_config(a_queue("a", v100=Quota(2.0, lending_limit=0.0)), a_queue("b")))
    stage.happens(NodeDown(at_s=0.0, node="m"))
    stage.submit_and_tick(a_job("j", "b", 4))
    assert stage.pending("j") is Pending.NOT_HEALTHY


@pytest.mark.parametrize("asks", [{"memory_gb": 24.0}, {"widest": Level.NODE}])
def test_a_gang_that_no_idle_cluster_would_hold_is_set_aside(asks: dict[str, Any]) -> None:
    stage = a_stage(a_node("n", memory_gb=16.0), a_node("m", memory_gb=32.0), config=a_config())
    stage.submit(a_job("never", gang=6, **asks), a_job("fine", gang=6))
    assert placed(stage.tick()) == ["fine"]
    assert stage.pending("never") is Pending.GANG_TOO_LARGE


# --- backfill --------------------------------------------------------------------------------------------------------


def backfill(reservations: int) -> Stage:
    """Two of four devices are busy until 1,000 s; a gang of four waits. Then a short and a long job of one."""
    stage = one_node(reservations=reservations)
    stage.submit_and_tick(a_job("runs", gang=2, work_unit_s=2000.0))
    stage.submit_and_tick(a_job("head", gang=4))
    stage.submit_and_tick(a_job("long", work_unit_s=5000.0), a_job("short", work_unit_s=900.0))
    return stage


def test_easy_backfill_lets_in_only_what_is_gone_by_the_shadow() -> None:
    stage = backfill(1)
    assert sorted(stage.runs()) == ["runs", "short"]
    assert stage.pending("long") is Pending.BEHIND_RESERVATION
    assert "would delay head, which starts in about 17 min" in stage.why("long").sentence
    (shadow,) = survey(stage.world, 0.0).reservations
    assert (shadow.job, shadow.at_s, shadow.devices) == ("head", 1000.0, frozenset({"n:0", "n:1", "n:2", "n:3"}))


def test_without_reservations_everyone_slips_in() -> None:
    assert sorted(backfill(0).runs()) == ["long", "runs", "short"]


def test_I12_a_long_job_may_start_beside_the_reserved_devices() -> None:
    stage = a_stage(a_node("n"), a_node("m", devices=1), config=a_config())
    stage.submit_and_tick(a_job("runs", gang=3, work_unit_s=3000.0))
    stage.submit_and_tick(a_job("head", gang=4, widest=Level.NODE))
    stage.submit_and_tick(a_job("beside", work_unit_s=1e6))
    assert stage.run_of("beside").devices == ("m:0",)
    stage.submit_and_tick(a_job("in the way", work_unit_s=1e6))
    assert stage.pending("in the way") is Pending.BEHIND_RESERVATION


def test_conservative_backfill_keeps_the_second_start_too() -> None:
    """Behind the head a second gang waits; EASY lets a job delay it, conservative does not."""
    def play(reservations: int) -> Stage:
        stage = a_stage(a_node("n", devices=6), config=a_config(reservations=reservations))
        stage.submit_and_tick(a_job("runs", gang=5, work_unit_s=5000.0))
        stage.submit_and_tick(a_job("head", gang=4, work_unit_s=4000.0), a_job("second", gang=2, work_unit_s=2000.0))
        return stage.submit(a_job("third", work_unit_s=5000.0))
    # Until 1,000 s one device is free. head takes four of the six then, second the other two.
    easy, conservative = play(1), play(2)
    assert placed(easy.tick()) == ["third"]
    assert placed(conservative.tick()) == []
    assert conservative.pending("third") is Pending.BEHIND_RESERVATION


def test_F16_a_run_that_outlives_its_estimate_does_not_promise_the_past() -> None:
    stage = one_node()
    stage.submit_and_tick(a_job("runs", gang=4, work_unit_s=400.0))
    stage.submit(a_job("head", gang=4)).tick(5000.0)
    (shadow,) = survey(stage.world, 5000.0).reservations
    assert shadow.at_s == 5500.0


def test_the_head_starts_when_its_shadow_is_here() -> None:
    stage = backfill(1)
    stage.now_s = 950.0
    stage.ends("short")
    stage.now_s = 1000.0
    stage.ends("runs").tick()
    assert sorted(stage.runs()) == ["head"]


def test_a_lent_device_counts_for_a_shadow_only_within_its_promise() -> None:
    stage = a_stage(a_node("i", pool="inference"), config=a_config(promised_min_s=1000.0), backends=4)
    stage.supply(1).submit_and_tick(a_job("runs", gang=4, work_unit_s=400.0))
    stage.obey().tick()
    stage.submit_and_tick(a_job("fits", gang=4, work_unit_s=3000.0))
    assert [found.job for found in survey(stage.world, 0.0).reservations] == ["fits"]
    stage.happens(JobCancelled(at_s=0.0, job="fits"))
    stage.submit_and_tick(a_job("too long", gang=4, work_unit_s=4000.0))
    assert survey(stage.world, 0.0).reservations == ()


# --- reclaim ---------------------------------------------------------------------------------------------------------


def borrowed(**rules: Any) -> Stage:
    """b has lent all of its four devices to a."""
    stage = a_stage(a_node("n", devices=8), config=a_config(a_queue("a", v100=4), a_queue("b", v100=4), **rules))
    stage.submit_and_tick(*(a_job(f"a{n}", "a", 2, priority=-n) for n in range(4)))
    assert len(stage.runs()) == 4
    return stage


def lent_whole(guarantee: int, lower: bool = False) -> Stage:
    """A node of four on which one gang stands: borrowed from `b`, or of `b` itself and less urgent."""
    stage = a_stage(a_node("n"), config=a_config(a_queue("a"), a_queue("b", v100=guarantee)))
    stage.submit_and_tick(a_job("gang", "b" if lower else "a", 4, priority=-1))
    assert len(stage.run_of("gang").devices) == 4
    return stage


@pytest.mark.parametrize(("guarantee", "most", "taken"), [(4, 4, 4), (4, 3, 3), (2, 4, 2), (1, 4, 1)])
def test_an_elastic_job_takes_what_is_freed_for_it_within_its_guarantee(guarantee: int, most: int, taken: int) -> None:
    stage = lent_whole(guarantee)
    stage.submit(a_job("b1", "b", kind=Kind.FINETUNE, gang_max=most))
    (claim,) = only(ClaimMade, stage.tick(100.0))
    assert len(claim.claim.devices) == taken
    stage.leave().tick(101.0)
    assert len(stage.run_of("b1").devices) == taken


def test_an_elastic_job_takes_what_a_less_urgent_one_of_its_queue_leaves() -> None:
    stage = lent_whole(2, lower=True)
    stage.submit(a_job("b1", "b", kind=Kind.FINETUNE, gang_max=3))
    (claim,) = only(ClaimMade, stage.tick(100.0))
    assert claim.why.reason is Reason.PRIORITY
    assert len(claim.claim.devices) == 3


def test_what_an_elastic_job_does_not_take_is_for_those_behind_it() -> None:
    stage = lent_whole(2)
    stage.submit(a_job("b1", "b", kind=Kind.FINETUNE, gang_max=4), a_job("a1", "a", 2)).tick(100.0)
    stage.leave().tick(101.0)
    assert stage.runs() == {"b1": "v100", "a1": "v100"}


def test_a_guarantee_is_taken_back_and_no_more() -> None:
    stage = borrowed()
    events = stage.submit(a_job("b1", "b", 3)).tick(100.0)
    assert [event.why.reason for event in only(StopOrdered, events)] == [Reason.RECLAIMED] * 2
    stage.submit_and_tick(a_job("b2", "b", 2))
    assert stage.pending("b2") is not Pending.CLAIM, "with b1 in its claim, b would borrow"
    stage.leave().tick(101.0)
    assert sum(len(run.devices) for run in stage.world.runs.values() if run.queue == "a") == 4
    assert stage.run_of("b1").queue == "b"
    stage.replays()


def test_freed_devices_are_kept_for_who_took_them_back() -> None:
    stage = borrowed()
    stage.submit(a_job("b1", "b", 4)).tick(100.0)
    first, second = (run.id for run in stage.world.runs.values() if run.stop_by_s is not None)
    stage.vacate(first)
    stage.submit_and_tick(a_job("thief", "a", 2, priority=99))
    assert "thief" not in stage.runs()
    stage.vacate(second)
    assert placed(stage.tick(101.0)) == ["b1"]


def test_P63_nobody_is_stopped_for_fragments() -> None:
    """A gang that must stand on one node; a's borrowed runs lie on two nodes with half a node each."""
    stage = a_stage(a_node("n", devices=2), a_node("m", devices=2), config=a_config(a_queue("a", v100=2),
                                                                                   a_queue("b", v100=2)))
    stage.submit_and_tick(*(a_job(f"a{n}", "a", 1, work_unit_s=100.0 * n + 100) for n in range(4)))
    events = stage.submit(a_job("b1", "b", 2, widest=Level.NODE)).tick(100.0)
    stopped = {event.run.split(".")[0] for event in only(StopOrdered, events)}
    on = {stage.world.runs[event.run].devices[0][0] for event in only(StopOrdered, events)}
    assert len(stopped) == 2
    assert len(on) == 1
    stage = a_stage(a_node("n", devices=2), a_node("m", devices=2), config=a_config(
        a_queue("a", v100=1), a_queue("b", v100=2), a_queue("c", v100=1)))
    stage.submit_and_tick(a_job("c0", "c"), a_job("a0", "a"))
    stage.submit_and_tick(a_job("a1", "a"), a_job("a2", "a"))
    assert stage.submit(a_job("b1", "b", 2, widest=Level.ISLAND)).tick(100.0) != []
    blocked = a_stage(a_node("n", devices=1), a_node("m", devices=1), config=a_config(
        a_queue("a"), a_queue("b", v100=2)))
    blocked.submit_and_tick(a_job("a0", "a"), a_job("a1", "a"))
    assert blocked.submit(a_job("b1", "b", 2, widest=Level.NODE)).tick(100.0) == []


def test_who_takes_a_card_second_does_not_speak_for_the_one_that_has_its_reservation_there() -> None:
    stage = a_stage(a_node("n", devices=2), a_node("m", "p100", devices=2))
    stage.submit_and_tick(a_job("low", gang=2, work_unit_s=6000.0),
                          a_job("high", gang=2, priority=9, cards=("p100",), work_unit_s=100.0))
    stage.submit(a_job("either", gang=2, priority=5, cards=("p100", "v100")), a_job("only there", gang=2, priority=5))
    assert [event.claim.job for event in only(ClaimMade, stage.tick(1.0))] == ["only there"]


def test_who_cannot_save_its_work_does_not_speak_for_one_that_may_stand_on_a_loan() -> None:
    """The idle replica is promised for half an hour: too short for the first of two gangs that are alike otherwise."""
    stage = a_stage(a_node("n", devices=1), a_node("i", devices=1, pool="inference"), backends=1).supply(1)
    stage.submit_and_tick(a_job("low"))
    stage.submit_and_tick(a_job("guest"))
    stage.obey().tick()
    stage.obey(EffectKind.START).ends("guest")
    stage.now_s = 1.0
    stage.submit(a_job("long", gang=2, priority=5, work_unit_s=1e5, checkpoint=None),
                 a_job("saves", gang=2, priority=5))
    (claim,) = only(ClaimMade, stage.tick())
    assert (claim.claim.job, sorted(claim.claim.devices)) == ("saves", ["i:0", "n:0"])


def test_I9_who_keeps_to_the_guarantee_loses_nothing_even_where_more_was_promised_than_there_is() -> None:
    stage = a_stage(a_node("n"), config=a_config(a_queue("a", v100=3), a_queue("b", v100=4)))
    stage.submit_and_tick(a_job("a0", "a", 3), a_job("b0", "b", 1))
    assert stage.submit(a_job("b1", "b", 2)).tick(100.0) == []
    assert stage.pending("b1") is Pending.DEVICES_BUSY


def test_P57_a_queue_without_quota_beside_borrowers_reaches_rest() -> None:
    """`Stage.tick` plans twice and fails where the second plan adds something; here with time going on, too."""
    stage = a_stage(a_node("n"), config=a_config(a_queue("guaranteed", v100=0), a_queue("x"), a_queue("y", weight=0.0)))
    stage.submit_and_tick(*(a_job(f"{queue}{n}", queue, 2) for queue in ("guaranteed", "x", "y") for n in range(2)))
    stage.obey()
    assert all(stage.tick(float(now_s)) == [] for now_s in range(1, 100, 7))


def test_P62_I13_reclaim_does_not_swing_back() -> None:
    stage = borrowed()
    stage.submit(a_job("b1", "b", 4)).tick(100.0)
    stage.leave().tick(101.0)
    stops = []
    for now_s in range(102, 2000, 50):
        stage.leave()
        stops += only(StopOrdered, stage.tick(float(now_s)))
    assert stops == [], "those who lost wait; they would borrow, so they take nothing back"
    assert sorted(stage.runs()) == ["a0", "a1", "b1"]


def test_a_young_run_is_left_in_peace() -> None:
    stage = borrowed(min_run_s=600.0)
    assert only(StopOrdered, stage.submit(a_job("b1", "b", 2)).tick(599.0)) == []
    assert len(only(StopOrdered, stage.tick(600.0))) == 1


def test_batch_goes_first() -> None:
    stage = a_stage(a_node("n"), config=a_config(a_queue("a"), a_queue("b", v100=1)))
    stage.submit_and_tick(a_job("train", "a", 2), a_job("bulk", "a", 2, kind=Kind.BATCH))
    (stop,) = only(StopOrdered, stage.submit(a_job("b1", "b")).tick(100.0))
    assert stop.run == stage.run_of("bulk").id


def test_of_two_borrowers_the_one_with_more_units_gives() -> None:
    """By cards a (two) would give before b (one); b's V100 is worth more than a's K80 together. Both on either card."""
    stage = a_stage(a_node("v", devices=2), config=a_config(a_queue("a"), a_queue("b"), a_queue("c", v100=1)))
    stage.submit_and_tick(a_job("a1", "a", family="Transformer"), a_job("b1", "b", family="Transformer"))
    stage.happens(*a_stage(a_node("k", "k80", 1)).journal[-1:])
    stage.submit_and_tick(a_job("a2", "a", cards=("k80",), family="Transformer"))
    (stop,) = only(StopOrdered, stage.submit(a_job("c1", "c")).tick(100.0))
    assert stop.run == stage.run_of("a1").id
    stage = a_stage(a_node("v", devices=2), a_node("k", "k80", 3), config=a_config(
        a_queue("a", v100=0, k80=0), a_queue("b"), a_queue("c", v100=1)))
    stage.submit_and_tick(a_job("b1", "b", gang=2, family="Transformer"),
                          a_job("a1", "a", 3, cards=("k80",), family="Transformer"))
    (stop,) = only(StopOrdered, stage.submit(a_job("c1", "c")).tick(100.0))
    assert stop.run == stage.run_of("b1").id


def test_a_claim_that_cannot_come_true_is_dropped() -> None:
    stage = borrowed()
    stage.submit(a_job("b1", "b", 4)).tick(100.0)
    assert stage.pending("b1") is Pending.CLAIM
    stage.happens(NodeDown(at_s=101.0, node="n")).tick(101.0)
    assert stage.world.claims == {}
    assert stage.pending("b1") is Pending.NOT_HEALTHY


def test_P65_a_queue_may_vanish_under_its_jobs() -> None:
    stage = borrowed()
    stage.submit(a_job("b1", "b", 2), a_job("a9", "a")).tick(100.0)
    stage.happens(ConfigLoaded(at_s=101.0, config=a_config(a_queue("b", v100=4), version="c1")))
    for now_s in (101.0, 102.0, 160.0, 200.0):
        stage.tick(now_s)
        stage.leave()
    assert stage.pending("a9") is Pending.QUEUE_UNKNOWN
    assert "b1" in stage.runs()


# --- kinds and windows -----------------------------------------------------------------------------------------------


def test_batch_only_fills_what_is_left() -> None:
    stage = one_node()
    stage.submit_and_tick(a_job("bulk", gang=2, kind=Kind.BATCH, priority=99), a_job("train", gang=3))
    assert stage.runs() == {"train": "v100"}
    assert [found.job for found in survey(stage.world, 0.0).reservations] == []


def test_an_elastic_gang_takes_what_there_is() -> None:
    stage = one_node(6)
    stage.submit_and_tick(a_job("fixed", gang=3))
    stage.submit_and_tick(a_job("tune", kind=Kind.FINETUNE, gang_min=1, gang_max=4))
    assert len(stage.run_of("tune").devices) == 3


def at_noon(stage: Stage) -> float:
    """World seconds of the next noon, UTC."""
    return 86400.0 - (stage.world.wall_s(0.0) % 86400.0) + 43200.0


@pytest.mark.parametrize(("days", "opens_s"), [((0, 1, 2, 3, 4, 5, 6), 10 * 3600.0), ((4,), 34 * 3600.0),
                                               ((3,), 10 * 3600.0), ((2,), 6 * 86400.0 + 36000.0)])
def test_when_a_window_opens_next(days: tuple[int, ...], opens_s: float) -> None:
    """Thursday, noon: it opens at 22:00."""
    window = Window(22 * 60, 6 * 60, days)
    assert window.opens_in_s(43200.0) == opens_s
    assert window.closes_in_s(43200.0 + opens_s) == 8 * 3600.0
    assert window.closes_in_s(43200.0 + opens_s - 1.0) is None


@given(st.integers(0, 1439), st.integers(0, 1439), st.sets(st.integers(0, 6), min_size=1),
       st.floats(0.0, 2e9), st.sampled_from([-12.0, 0.0, 5.5, 14.0]))
def test_a_closed_window_is_open_when_it_says_that_it_opens(
    opens: int, closes: int, days: set[int], wall_s: float, offset_h: float
) -> None:
    window = Window(opens, closes, tuple(sorted(days)), offset_h * 3600.0)
    opens_in_s = window.opens_in_s(wall_s)
    assert 0.0 <= opens_in_s <= 7 * 86400.0
    assert window.closes_in_s(wall_s + opens_in_s + 1.0) is not None


def test_why_says_when_a_window_opens() -> None:
    stage = one_node()
    stage.now_s = at_noon(stage)
    stage.submit_and_tick(a_job("night", windows=(Window(22 * 60, 6 * 60),)))
    assert stage.why("night").sentence == "None of its time windows is open: the next one opens in about 10.0 h."


def test_a_window_that_closes_when_it_opens_is_a_whole_day() -> None:
    assert Window(600, 600, (3,)).closes_in_s(600 * 60.0) == 86400.0


def test_a_window_opens_and_closes() -> None:
    stage = one_node()
    noon_s = at_noon(stage)
    night = Window(opens_minute=22 * 60, closes_minute=6 * 60)
    stage.now_s = noon_s
    stage.submit_and_tick(a_job("tune", kind=Kind.FINETUNE, windows=(night,), work_unit_s=1e6))
    assert stage.pending("tune") is Pending.WINDOW_CLOSED
    assert placed(stage.tick(noon_s + 10 * 3600.0)) == ["tune"]
    stage.obey()
    assert stage.tick(noon_s + 17 * 3600.0) == []
    (stop,) = only(StopOrdered, stage.tick(noon_s + 18 * 3600.0))
    assert stop.why.reason is Reason.WINDOW_CLOSED


def test_a_job_that_cannot_save_its_work_must_fit_into_its_window() -> None:
    stage = one_node()
    stage.now_s = at_noon(stage) + 17 * 3600.0
    night = Window(opens_minute=22 * 60, closes_minute=6 * 60)
    stage.submit_and_tick(a_job("short", windows=(night,), checkpoint=None, work_unit_s=3000.0),
                          a_job("long", windows=(night,), checkpoint=None, work_unit_s=4000.0))
    assert sorted(stage.runs()) == ["short"]


@pytest.mark.parametrize(("wall_s", "left_s"), [
    (4 * 86400.0 + 23 * 3600.0, 7 * 3600.0),  # Monday, 5 January 1970, 23:00
    (5 * 86400.0 + 5 * 3600.0, 3600.0),       # Tuesday, 05:00: Monday's window
    (5 * 86400.0 + 7 * 3600.0, None), (5 * 86400.0 + 23 * 3600.0, None)])
def test_a_window_over_midnight_belongs_to_the_day_it_opens(wall_s: float, left_s: float | None) -> None:
    assert Window(22 * 60, 6 * 60, days=(0,)).closes_in_s(wall_s) == left_s
    assert Window(22 * 60, 6 * 60, days=(0,), utc_offset_s=3600.0).closes_in_s(wall_s - 3600.0) == left_s


# --- pools -----------------------------------------------------------------------------------------------------------


def test_I14_an_enclave_keeps_to_itself() -> None:
    enclave = Pool("vault", PoolKind.ENCLAVE, {"pool": "vault"}, reason="regulated data", review_on="2027-01-01")
    stage = a_stage(a_node("t", devices=1), a_node("v", pool="vault"), a_node("i", pool="inference"), backends=4,
                    config=a_config(a_queue("q"), a_queue("secret", parent="vault"),
                                    pools=(TRAINING, INFERENCE, enclave)))
    stage.supply(1)
    stage.submit_and_tick(a_job("open", gang=2), a_job("inside", "secret", 4), a_job("more", "secret", 1))
    assert {device[0] for device in stage.run_of("inside").devices} == {"v"}
    assert stage.pending("more") is Pending.DEVICES_BUSY, "an enclave borrows nothing"
    assert stage.world.claims["open"].loans == ("i-0",)


def test_a_transitional_pool_has_its_dates() -> None:
    stage = a_stage(config=a_config())
    wall_s = stage.world.wall_s(0.0)
    moving = Pool("moving", PoolKind.TRANSITIONAL, {"pool": "moving"}, starts_wall_s=wall_s + 100.0,
                  ends_wall_s=wall_s + 1000.0, then_pool="training")
    stage = a_stage(a_node("m", pool="moving"), config=a_config(
        a_queue("q"), a_queue("port", parent="moving"), pools=(TRAINING, INFERENCE, moving), warn_before_s=300.0))
    stage.submit_and_tick(a_job("early", "port", 2, work_unit_s=1e5))
    assert stage.pending("early") is Pending.POOL_CLOSED
    assert placed(stage.tick(100.0)) == ["early"]
    stage.obey()
    assert [type(event).__name__ for event in stage.tick(700.0)] == ["PoolEnding"]
    (stop,) = only(StopOrdered, stage.tick(1000.0))
    assert stop.why.reason is Reason.POOL_ENDED
    stage.submit_and_tick(a_job("next", "q", 4))
    assert stage.pending("next") is Pending.NO_SUCH_CARD, "the node is not empty yet"
    stage.now_s = 1010.0
    stage.leave()
    assert [type(event).__name__ for event in stage.tick(1010.0)] == ["NodeMoved", "RunPlaced"]
    assert stage.runs() == {"next": "v100"}


def test_a_cancelled_run_is_stopped_and_its_job_is_gone() -> None:
    stage = one_node()
    stage.submit_and_tick(a_job("j"))
    stage.obey().happens(JobCancelled(at_s=1.0, job="j"))
    (stop,) = only(StopOrdered, stage.tick(1.0))
    assert stop.why.reason is Reason.CANCELLED
    assert only(KillOrdered, stage.tick(56.0)) != []
    stage.obey()
    assert stage.world.jobs == {}


def test_a_job_that_keeps_crashing_is_given_up() -> None:
    stage = one_node(max_restarts=2)
    stage.submit_and_tick(a_job("j"))
    for _ in range(2):
        stage.obey().ends("j", Outcome.FAILED).tick()
        assert "j" in stage.runs()
    stage.obey().ends("j", Outcome.FAILED).tick()
    assert stage.world.jobs == {}


def test_a_job_that_crashes_waits_twice_as_long_each_time() -> None:
    stage = one_node(restart_pause_s=10.0, restart_pause_max_s=30.0, max_restarts=4)
    stage.submit_and_tick(a_job("j"))
    for pause_s in (10.0, 20.0, 30.0, 30.0):
        stage.obey().ends("j", Outcome.FAILED)
        crashed_s = stage.now_s
        assert stage.tick(crashed_s + 0.9 * pause_s) == []
        assert stage.pending("j") is Pending.CRASHED
        assert placed(stage.tick(crashed_s + pause_s)) == ["j"]
    stage.replays()


def test_a_pause_after_a_crash_is_told_with_its_end_and_keeps_nobody_else_waiting() -> None:
    stage = one_node(restart_pause_s=10.0)
    stage.submit_and_tick(a_job("j", gang=4, priority=9)).clear()
    stage.obey().ends("j", Outcome.FAILED)
    stage.submit(a_job("next", gang=4))
    assert placed(stage.tick(4.0)) == ["next"]
    assert stage.why("j").sentence == "It has crashed 1 times and has 4 tries in all: the next one is in about 6 s."


def test_who_was_recalled_or_lost_its_node_waits_for_no_pause() -> None:
    stage = a_stage(a_node("n"), a_node("m"), config=a_config(restart_pause_s=1000.0))
    stage.submit_and_tick(a_job("j", gang=4))
    (node,) = {device.partition(":")[0] for device in stage.run_of("j").devices}
    stage.obey().happens(NodeDown(at_s=1.0, node=node))
    assert placed(stage.tick(1.0)) == ["j"]


def test_a_job_may_crash_very_often() -> None:
    stage = one_node(restart_pause_s=1.0, restart_pause_max_s=5.0, max_restarts=5000)
    state = JobState(a_job("j"), crashes=4000)
    stage.world = stage.world.evolved(jobs={"j": state})
    stage.tick()
    stage.obey().ends("j", Outcome.FAILED)
    assert stage.world.jobs["j"].not_before_s == 5.0


def test_quotas_that_keep_devices_for_others_say_so() -> None:
    stage = a_stage(a_node("n"), config=a_config(a_queue("a"), a_queue("b", v100=Quota(2.0, lending_limit=0.0))))
    stage.submit_and_tick(a_job("a1", "a"), a_job("a2", "a", gang=2))
    assert stage.pending("a2") is Pending.QUOTA_KEPT
    stage.submit_and_tick(a_job("b1", "b", gang=2))
    assert stage.runs() == {"a1": "v100", "b1": "v100"}


def test_a_claim_names_what_it_is_for() -> None:
    stage = borrowed()
    (claim,) = only(ClaimMade, stage.submit(a_job("b1", "b", 4)).tick(100.0))
    assert claim.why.reason is Reason.RECLAIMED
    assert len(claim.claim.devices) == 4
    assert replace(claim.claim, made_s=0.0) != claim.claim


@pytest.mark.parametrize(("left_min", "checkpoint", "is_taken"),
                         [(5, None, False), (61, None, True), (5, CHECKPOINT, True)])
def test_nobody_is_stopped_for_a_run_that_its_window_would_end_before_anything_is_saved(
    left_min: int, checkpoint: Checkpoint | None, is_taken: bool
) -> None:
    stage = a_stage(a_node("n"), config=a_config(a_queue("a", v100=4), a_queue("b")))
    stage.now_s = at_noon(stage)
    stage.submit_and_tick(a_job("b", "b", 4, work_unit_s=1e6))
    stage.now_s += 1.0
    window = Window(11 * 60, 12 * 60 + left_min)
    events = stage.submit_and_tick(
        a_job("a", "a", 4, checkpoint=checkpoint, work_unit_s=4 * 3600.0, windows=(window,)))
    assert bool(only(StopOrdered, events)) is is_taken


def test_nothing_is_offered_to_a_run_that_its_window_would_end_before_anything_is_saved() -> None:
    stage = a_stage(a_node("t", "k80"), a_node("i", pool="inference"), backends=4).supply(1)
    stage.now_s = at_noon(stage)
    late = a_job("late", gang=4, checkpoint=None, work_unit_s=4 * 1200.0, windows=(Window(11 * 60, 12 * 60 + 5),))
    assert only(LoanOffered, stage.submit_and_tick(late)) == []
    assert only(LoanOffered, stage.submit_and_tick(replace(late, id="in time", windows=()))) != []
