"""Quotas: Kueue's arithmetic on examples worked out by hand, and shares in units."""

from random import Random

import pytest

from allocator.model.pools import UNITS, Config, Currency, Pool, PoolKind, Queue, Quota
from allocator.picture import ledger_of, picture_of
from allocator.quota import Books, books, share, tree_of
from tests.allocator_worlds import TRAINING, Stage, a_config, a_job, a_node, a_queue, a_stage


def the_books(queues: tuple[Queue, ...], own: dict[str, float], capacity: float, key: str = "v100") -> Books:
    return books(tree_of(Config("c", (TRAINING,), queues), TRAINING), key, own, capacity)


def test_idle_quota_is_borrowed() -> None:
    made = the_books((a_queue("a", v100=4), a_queue("b", v100=4)), {"a": 6.0}, 8.0)
    assert made.available("a") == 2.0
    assert made.available("b") == 2.0
    assert made.borrowed("a") == 2.0
    assert made.borrowed("b") == 0.0


def test_a_lending_limit_keeps_the_rest_at_home() -> None:
    """b keeps 3 of its 4 to itself: a may take its own 4 and 1 of b's."""
    queues = (a_queue("a", v100=4), a_queue("b", v100=Quota(4.0, lending_limit=1.0)))
    made = the_books(queues, {"a": 4.0}, 8.0)
    assert made.available("a") == 1.0
    assert made.available("b") == 4.0
    made.use("a", 1.0)
    assert made.available("a") == 0.0
    assert made.available("b") == 3.0


def test_a_borrowing_limit_caps_what_is_taken() -> None:
    queues = (a_queue("a", v100=Quota(4.0, borrowing_limit=1.0)), a_queue("b", v100=4))
    made = the_books(queues, {}, 8.0)
    assert made.available("a") == 5.0
    assert made.most("a") == made.most("a", 3.0) == 5.0
    made.use("a", 4.0)
    assert made.allowed("a") == 1.0


def test_quota_flows_through_a_tree() -> None:
    """dept (nominal of its own: 2) over x (4) and y (2); another department z has 4. Kueue's cohorts."""
    queues = (a_queue("dept", v100=2), a_queue("x", parent="dept", v100=4), a_queue("y", parent="dept", v100=2),
              a_queue("z", v100=4))
    made = the_books(queues, {"x": 7.0}, 12.0)
    assert made.subtree["dept"] == 8.0
    assert made.usage["dept"] == 7.0
    assert made.borrowed("x") == 3.0
    assert made.borrowed("dept") == 0.0
    assert made.available("y") == 5.0
    assert made.available("z") == 5.0


def test_devices_beyond_all_promises_are_for_everyone() -> None:
    made = the_books((a_queue("a", v100=2), a_queue("b", v100=2)), {}, 10.0)
    assert made.available("a") == 10.0
    assert made.borrowed("a", 3.0) == 1.0


def test_a_quota_cut_under_running_work_shows_negative_and_admits_nothing() -> None:
    made = the_books((a_queue("a", v100=1), a_queue("b", v100=1)), {"a": 6.0}, 2.0)
    assert made.available("a") == -4.0
    assert made.available("b") == -4.0


def test_adding_use_step_by_step_is_the_same_as_making_the_books_anew() -> None:
    """P61: there is one ledger, and it cannot drift from the runs that it counts."""
    rng = Random(7)
    for _ in range(300):
        names = ("d1", "d2", "a", "b", "c", "e")
        parents = ("training", "training", "d1", "d1", "d2", "training")
        queues = tuple(Queue(name, parent, {"v100": Quota(
            float(rng.randint(0, 6)), rng.choice((None, float(rng.randint(0, 6)))),
            rng.choice((None, float(rng.randint(0, 6)))))}) for name, parent in zip(names, parents, strict=True))
        step = the_books(queues, {}, 20.0)
        own: dict[str, float] = {}
        for _ in range(8):
            queue, amount = rng.choice(names), float(rng.randint(-3, 6))
            amount = max(amount, -own.get(queue, 0.0))
            own[queue] = own.get(queue, 0.0) + amount
            step.use(queue, amount)
        anew = the_books(queues, own, 20.0)
        assert {name: step.usage.get(name, 0.0) for name in names} == {name: anew.usage[name] for name in names}
        assert [step.available(name) for name in names] == [anew.available(name) for name in names]


def borrowers() -> Stage:
    """A borrows 12 K80, B 6 V100: B has taken half as many cards, and more compute."""
    stage = a_stage(a_node("k", "k80", 16), a_node("v", "v100", 8),
                    config=a_config(a_queue("a", k80=2, v100=1), a_queue("b", k80=2, v100=1)))
    family = "Transformer (batch size 16)"
    stage.submit_and_tick(*(a_job(f"a{n}", "a", 2, cards=("k80",), family=family) for n in range(7)),
                          *(a_job(f"b{n}", "b", 1, cards=("v100",), family=family) for n in range(7)))
    assert len(stage.runs()) == 14
    return stage


def test_shares_in_units_order_the_borrowers_otherwise_than_cards_do() -> None:
    stage = borrowers()
    ledger = ledger_of(stage.world, TRAINING, 0.0)
    assert (ledger.books["k80"].borrowed("a"), ledger.books["v100"].borrowed("b")) == (12.0, 6.0)
    k80 = stage.world.coefficients.coefficient("k80", "Transformer (batch size 16)")
    lendable = 16 * stage.world.coefficients.scalar("k80") + 8
    assert ledger.share("a") == pytest.approx(12 * k80 / lendable)
    assert ledger.share("b") == pytest.approx(6 / lendable)
    # 0.49 units a K80 at this family: 12 of them are 5.9 units.
    assert ledger.share("b") > ledger.share("a")


def test_a_share_knows_weights() -> None:
    assert share(0.0, 10.0, 0.0) == 0.0
    assert share(2.0, 10.0, 2.0) == pytest.approx(0.1)
    assert share(2.0, 10.0, 0.0) == float("inf")
    assert share(2.0, 0.0, 1.0) == float("inf")


def test_a_pool_that_counts_in_units_admits_by_units() -> None:
    """Two units are two V100 or, at this family, eight K80."""
    pool = Pool("training", PoolKind.TRAINING, {"pool": "training"}, Currency.UNITS)
    stage = a_stage(a_node("v", "v100", 4), a_node("k", "k80", 16), config=a_config(
        Queue("q", "training", {UNITS: Quota(2.0, borrowing_limit=0.0)}), pools=(pool,)))
    stage.submit_and_tick(*(a_job(f"v{n}", cards=("v100",), family="LM (batch size 5)") for n in range(3)))
    assert sorted(stage.runs()) == ["v0", "v1"]
    stage.ends("v0").ends("v1").tick()
    assert sorted(stage.runs()) == ["v2"]
    # 0.2335 units each: four of them fit into the unit that is left.
    stage.submit_and_tick(*(a_job(f"k{n}", cards=("k80",), family="LM (batch size 5)") for n in range(6)))
    assert sorted(stage.runs()) == ["k0", "k1", "k2", "k3", "v2"]


def test_F13_borrowed_runs_of_a_queue_are_summed() -> None:
    stage = a_stage(a_node("n", devices=8), config=a_config(
        a_queue("a", v100=Quota(2.0, borrowing_limit=3.0)), a_queue("b", v100=6)))
    stage.submit_and_tick(a_job("one", "a", 3), a_job("two", "a", 3))
    assert stage.runs() == {"one": "v100"}
    assert stage.pending("two").value == "quota_busy"
    assert "may take 2 more of v100, it needs 3" in stage.why("two").sentence


def test_I8_use_of_lent_devices_is_the_borrowers() -> None:
    stage = a_stage(a_node("t", "k80"), a_node("i", pool="inference"), backends=4)
    stage.supply(1)
    stage.submit_and_tick(a_job("j", gang=4))
    stage.obey().tick()
    picture = picture_of(stage.world, 0.0)
    assert ledger_of(stage.world, TRAINING, 0.0).books["v100"].own == {"q": 4.0}
    assert picture.capacity("training", "v100") == 4
    assert picture.capacity("inference", "v100") == 0
