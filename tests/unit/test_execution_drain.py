"""What becomes of a run next: a pure function, held to what the loan promises."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allocator.execution.drain import (
    Conclude,
    Kill,
    Orders,
    Rules,
    Seen,
    Signal,
    Wait,
    deadline_on_the_wall,
    is_settled,
    next_act,
    order_to_go,
)

NOW_S = 1000.0
RULES = Rules(kill_margin_s=0.5, linger_s=2.0, acknowledged_by_file=True)
RUNNING = Seen(2, members_alive_acknowledged=0, any_acknowledged=False, others_alive=1, settled_boot_s=None)
ASKED = Orders(epoch=1, deadline_unix_s=5000.0, deadline_boot_s=NOW_S + 10, signal=10, saving=True)

times = st.floats(0, 1e6)
seen_of_any_kind = st.builds(
    lambda alive, share, others, settled_s: Seen(alive, min(alive, share), share > 0, others, settled_s),
    st.integers(0, 4), st.integers(0, 4), st.integers(0, 3), st.none() | times)
orders_of_any_kind = st.builds(
    lambda due_s, signum, saving, kill: Orders(1, due_s, due_s, signum, saving and signum is not None, kill),
    st.none() | times, st.sampled_from([None, 10, 15]), st.booleans(), st.booleans())
rules_of_any_kind = st.builds(Rules, st.floats(0, 5), st.floats(0, 60), st.booleans())


@pytest.mark.parametrize(("seen", "orders", "signalled", "now_s", "act"), [
    (RUNNING, Orders(1), (), NOW_S, Wait(None)),
    (replace(RUNNING, members_alive=0, others_alive=0), ASKED, (10,), NOW_S, Conclude()),
    (RUNNING, ASKED, (), NOW_S, Signal(10)),
    (RUNNING, ASKED, (10,), NOW_S, Wait(NOW_S + 9.5)),
    (RUNNING, ASKED, (10,), NOW_S + 9.5, Kill("deadline")),
    (RUNNING, ASKED, (), NOW_S + 9.5, Kill("deadline")),
    (RUNNING, replace(ASKED, signal=15, saving=False), (10,), NOW_S, Signal(15)),
    (RUNNING, replace(ASKED, kill=True), (), NOW_S, Kill("ordered")),
    (replace(RUNNING, settled_boot_s=NOW_S), ASKED, (10,), NOW_S + 1, Wait(NOW_S + 2)),
    (replace(RUNNING, settled_boot_s=NOW_S), ASKED, (10,), NOW_S + 2, Kill("leftovers")),
    (replace(RUNNING, settled_boot_s=NOW_S + 9), ASKED, (10,), NOW_S + 9, Wait(NOW_S + 9.5)),
    (replace(RUNNING, members_alive=0, settled_boot_s=NOW_S), Orders(1), (), NOW_S + 2, Kill("leftovers")),
    # Nobody is left to hear it: what survives has the grace, and no signal it does not know.
    (replace(RUNNING, members_alive=0), ASKED, (), NOW_S, Wait(NOW_S + 9.5)),
])
def test_the_first_rule_that_applies(
    seen: Seen, orders: Orders, signalled: tuple[int, ...], now_s: float, act: object
) -> None:
    assert next_act(seen, orders, signalled, RULES, now_s) == act


@pytest.mark.parametrize(("alive", "acknowledged", "any_acknowledged", "orders", "by_file", "settled"), [
    (2, 0, False, Orders(1), True, False),
    (2, 1, True, ASKED, True, False),
    (2, 2, True, ASKED, True, True),
    (1, 1, True, ASKED, True, True),
    (2, 2, True, ASKED, False, False),
    (0, 0, True, ASKED, True, True),
    (0, 0, False, ASKED, True, False),
    (0, 0, False, ASKED, False, True),
    (0, 0, False, Orders(1), True, True),
    (0, 0, False, replace(ASKED, signal=15, saving=False), True, True),
    (1, 1, True, replace(ASKED, signal=15, saving=False), True, False),
])
def test_settled_means_nothing_left_to_save(
    alive: int, acknowledged: int, any_acknowledged: bool, orders: Orders, by_file: bool, settled: bool
) -> None:
    assert is_settled(Seen(alive, acknowledged, any_acknowledged, 1, None), orders, by_file) is settled


@given(seen_of_any_kind, orders_of_any_kind, rules_of_any_kind, times)
def test_nothing_outlives_its_deadline_and_nothing_is_forced_before(
    seen: Seen, orders: Orders, rules: Rules, now_s: float
) -> None:
    act = next_act(seen, orders, (), rules, now_s)
    someone = seen.members_alive + seen.others_alive > 0
    assert isinstance(act, Conclude) is not someone
    due = orders.deadline_boot_s is not None and now_s >= orders.deadline_boot_s - rules.kill_margin_s
    lingered = seen.settled_boot_s is not None and now_s >= seen.settled_boot_s + rules.linger_s
    assert isinstance(act, Kill) is (someone and (orders.kill or due or lingered))


@given(seen_of_any_kind, orders_of_any_kind, rules_of_any_kind, times)
def test_who_waits_as_long_as_told_has_something_to_do_then(
    seen: Seen, orders: Orders, rules: Rules, now_s: float
) -> None:
    act = next_act(seen, orders, (10, 15), rules, now_s)
    if isinstance(act, Wait) and act.until_boot_s is not None:
        assert act.until_boot_s > now_s
        assert isinstance(next_act(seen, orders, (10, 15), rules, act.until_boot_s), Kill)


wanted = st.tuples(st.floats(0, 100), st.floats(-3600, 3600), st.booleans(), st.integers(0, 3))


@given(st.lists(wanted, min_size=1, max_size=8))
def test_a_deadline_is_never_lengthened_nor_an_epoch_lowered(asks: list[tuple[float, float, bool, int]]) -> None:
    """Recalls and stops in any order, while the wall clock jumps between them: the boot clock alone counts."""
    orders, sent, epoch = Orders(epoch=0), [], 0
    for grace_s, jump_s, saving, rise in asks:
        epoch += rise
        after = order_to_go(orders, epoch, 1e6 + jump_s + grace_s, NOW_S + grace_s,
                            signum=10 if saving else 15, saving=saving)
        repeated = 1e6 + jump_s + grace_s in sent
        sent.append(1e6 + jump_s + grace_s)
        assert after.deadline_boot_s is not None
        assert after.deadline_boot_s <= (orders.deadline_boot_s or float("inf"))
        assert repeated or after.deadline_boot_s <= NOW_S + grace_s
        assert after.epoch == epoch
        assert not (orders.signal == 15 and after.signal != 15), "told to stop, it does not save after all"
        assert order_to_go(after, epoch, 1e6 + jump_s + grace_s, NOW_S + grace_s,
                           signum=10 if saving else 15, saving=saving) == after
        orders = after


def test_the_same_deadline_again_is_the_same_order_wherever_the_wall_clock_went() -> None:
    assert order_to_go(ASKED, 1, 5000.0, NOW_S - 3590, signum=10, saving=True) == ASKED


def test_the_deadline_is_told_in_the_time_that_the_wall_shows_now() -> None:
    assert deadline_on_the_wall(Orders(1), NOW_S, 4990.0) is None
    assert deadline_on_the_wall(ASKED, NOW_S, 4990.0) == 5000.0
    assert deadline_on_the_wall(ASKED, NOW_S, 4990.0004) == 5000.0, "noise of two readings"
    assert deadline_on_the_wall(ASKED, NOW_S, 8590.0) == 8600.0
