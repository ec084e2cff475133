"""What becomes of a run next, as a pure function of what is seen of it. Time is an argument; nothing is touched.

With deadline D, kill margin m and linger l, the first that applies:

1. no process is left                                  → conclude
2. told to kill                                        → kill
3. now ≥ D - m                                         → kill: what ignores its signal is gone by D
4. the signal is not sent                              → signal
5. settled since s, now ≥ s + l                        → kill the leftovers
6. else                                                → wait until D - m or s + l, whichever is first

A run is *settled* when it has nothing more to save. Unasked or asked only to stop: its members have ended. Asked to
save: every living member has acknowledged; with none alive, one has, or its contract takes the exit for it. Members
that ended without a word leave what survives them the whole grace: it may be what writes the checkpoint.
"""

from dataclasses import dataclass, replace

LEFTOVERS = "leftovers"
CLOCK_NOISE_S = 0.001
"""Two clocks are not read in the same instant, and the wall's is slewed a little all the time."""


@dataclass(frozen=True, slots=True)
class Orders:
    """What the run was told. Times `_boot_s` are on the clock that runs from boot and never jumps."""

    epoch: int
    deadline_unix_s: float | None = None
    deadline_boot_s: float | None = None
    signal: int | None = None
    """To be sent to each member, once."""
    saving: bool = False
    """The signal asks for a checkpoint."""
    kill: bool = False


@dataclass(frozen=True, slots=True)
class Seen:
    """A run as its shim sees it. A member is the process that was started for a rank, without its children."""

    members_alive: int
    members_alive_acknowledged: int
    any_acknowledged: bool
    others_alive: int
    """Children, and what escaped."""
    settled_boot_s: float | None
    """Since when it is settled; `None` while it is not."""


@dataclass(frozen=True, slots=True)
class Rules:
    """The part of the contract that is about time, in seconds."""

    kill_margin_s: float
    linger_s: float
    acknowledged_by_file: bool


@dataclass(frozen=True, slots=True)
class Conclude:
    """Nothing is left: close the record."""


@dataclass(frozen=True, slots=True)
class Kill:
    """SIGKILL to all of it."""

    why: str


@dataclass(frozen=True, slots=True)
class Signal:
    """Send the signal to each member."""

    signum: int


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to do before this time; `None`: before something happens."""

    until_boot_s: float | None


Act = Conclude | Kill | Signal | Wait


def is_settled(seen: Seen, orders: Orders, acknowledged_by_file: bool) -> bool:
    """True when the run has nothing more to save."""
    if seen.members_alive:
        return orders.saving and acknowledged_by_file and seen.members_alive_acknowledged == seen.members_alive
    return not (orders.saving and acknowledged_by_file) or seen.any_acknowledged


def next_act(seen: Seen, orders: Orders, signalled: tuple[int, ...], rules: Rules, now_boot_s: float) -> Act:
    """What to do now; see the head of this module."""
    if seen.members_alive + seen.others_alive == 0:
        return Conclude()
    if orders.kill:
        return Kill("ordered")
    times = []
    if orders.deadline_boot_s is not None:
        times.append((orders.deadline_boot_s - rules.kill_margin_s, "deadline"))
    if seen.settled_boot_s is not None:
        times.append((seen.settled_boot_s + rules.linger_s, LEFTOVERS))
    due = [why for at_s, why in times if now_boot_s >= at_s]
    if due:
        return Kill(due[0])
    if orders.signal is not None and orders.signal not in signalled and seen.members_alive:
        return Signal(orders.signal)
    return Wait(min((at_s for at_s, _ in times), default=None))


def order_to_go(
    before: Orders, epoch: int, deadline_unix_s: float, deadline_boot_s: float, *, signum: int, saving: bool
) -> Orders:
    """The orders after one more to go by a deadline, saved or not.

    The earlier deadline holds, compared on the clock that never jumps; the same wall-clock deadline again is the same
    order again, even if the wall clock has moved in between. Told to stop, a run does not save after all.
    """
    orders = replace(before, epoch=epoch)
    if before.deadline_boot_s is None or (
            deadline_unix_s != before.deadline_unix_s and deadline_boot_s < before.deadline_boot_s):
        orders = replace(orders, deadline_unix_s=deadline_unix_s, deadline_boot_s=deadline_boot_s)
    if saving and before.signal is not None:
        return orders
    return replace(orders, signal=signum, saving=saving)


def deadline_on_the_wall(orders: Orders, now_boot_s: float, now_unix_s: float) -> float | None:
    """Where the deadline stands on the wall clock now: as it was set, or elsewhere if that clock has jumped since."""
    if orders.deadline_boot_s is None or orders.deadline_unix_s is None:
        return None
    stands_unix_s = now_unix_s + orders.deadline_boot_s - now_boot_s
    return orders.deadline_unix_s if abs(stands_unix_s - orders.deadline_unix_s) < CLOCK_NOISE_S else stands_unix_s
