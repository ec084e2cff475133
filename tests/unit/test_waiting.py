"""The queue for when no backend is up: who leaves it when, on a clock of the test's own."""

from collections.abc import Callable
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from policies.admission import AdmissionRules, ClassRules, Refusal, Refused
from policies.facts import Budget, RequestFacts
from router.path.waiting import LOOK_EVERY_S, WaitingRoom
from tests.policy_fleet import a_request

RULES = AdmissionRules(100, 3, {"one": ClassRules(max_waiting=1)})


class Loop:
    """A clock with timers; `after` lets time pass."""

    def __init__(self) -> None:
        self.now_s = 50.0
        self.timers: list[tuple[float, Callable[[], None], list[bool]]] = []

    def clock(self) -> float:
        return self.now_s

    def call_later(self, wait_s: float, what: Callable[[], None]) -> "Timer":
        live = [True]
        self.timers.append((self.now_s + wait_s, what, live))
        return Timer(live)

    def after(self, wait_s: float) -> None:
        until_s = self.now_s + wait_s
        while due := sorted([timer for timer in self.timers if timer[2][0] and timer[0] <= until_s],
                            key=lambda timer: timer[0]):
            at_s, what, live = due[0]
            live[0] = False
            self.now_s = max(self.now_s, at_s)
            what()
        self.now_s = until_s

    @property
    def armed(self) -> int:
        return sum(live[0] for _, _, live in self.timers)


class Timer:
    def __init__(self, live: list[bool]) -> None:
        self._live = live

    def cancel(self) -> None:
        self._live[0] = False


class World:
    """A room, and a backend that takes `places` requests."""

    def __init__(self) -> None:
        self.loop = Loop()
        self.room = WaitingRoom(self.loop.clock, self.loop.call_later)
        self.places = 0
        self.served: list[str] = []
        self.refused: list[tuple[str, Refusal]] = []
        self.keys: dict[str, int] = {}

    def enter(self, name: str, back_in_s: float | None = None, **facts: object) -> Refused | None:
        wanted = replace(a_request(budget=Budget(ttft_s=10.0)), **facts)  # type: ignore[arg-type]
        answer = self.room.enter(RULES, One(self, name), wanted, back_in_s)
        if isinstance(answer, Refused):
            return answer
        self.keys[name] = answer
        return None


class One:
    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.facts: RequestFacts = a_request()

    def offer(self) -> bool:
        if self.world.places <= 0:
            return False
        self.world.places -= 1
        self.world.served.append(self.name)
        return True

    def turn_away(self, reason: Refusal) -> None:
        self.world.refused.append((self.name, reason))


def test_a_change_of_health_offers_a_place_in_the_loops_next_turn_by_importance() -> None:
    world = World()
    world.enter("low", priority=-1)
    world.enter("high", priority=5)
    world.enter("urgent", priority=5, budget=Budget(ttft_s=2.0))
    world.places = 2
    world.room.wake()
    assert world.served == []
    world.loop.after(0.0)
    assert world.served == ["urgent", "high"]
    assert len(world.room) == 1


def test_time_alone_opens_a_place_too() -> None:
    world = World()
    world.enter("a")
    world.loop.after(0.2)
    world.places = 1
    world.loop.after(LOOK_EVERY_S)
    assert world.served == ["a"]
    assert world.loop.armed == 0, "nobody waits, nothing ticks"


def test_four_tenths_of_the_budget_are_waited_and_no_longer() -> None:
    world = World()
    world.enter("a")
    world.enter("spent", waited_s=3.5)
    world.loop.after(0.55)
    assert world.refused == [("spent", Refusal.NO_WAITING)]
    world.loop.after(3.4)
    assert len(world.room) == 1
    world.loop.after(0.11)
    assert world.refused[1:] == [("a", Refusal.NO_WAITING)]
    assert world.loop.armed == 0


def test_who_cannot_be_served_in_time_does_not_wait() -> None:
    world = World()
    assert world.enter("late", back_in_s=4.1) == Refused(Refusal.NO_WAITING, 4.1)
    refused = world.enter("never", back_in_s=float("inf"))
    assert refused is not None
    assert refused.reason is Refusal.NO_WAITING
    assert world.enter("in time", back_in_s=3.9) is None


def test_a_full_room_gives_the_place_of_the_least_important_away() -> None:
    world = World()
    for name, priority in (("a", 0), ("b", -3), ("c", 0)):
        world.enter(name, priority=priority)
    assert world.enter("d", priority=1) is None
    assert world.refused == [("b", Refusal.QUEUE_FULL)]
    refused = world.enter("e", priority=-9)
    assert refused is not None
    assert refused.reason is Refusal.QUEUE_FULL
    assert len(world.room) == 3


def test_a_class_has_no_more_places_than_it_may() -> None:
    world = World()
    assert world.enter("a", latency_class="one") is None
    assert world.enter("b", latency_class="one") is not None
    assert world.room.by_class() == {"one": 1}


def test_who_has_left_is_offered_nothing() -> None:
    world = World()
    world.enter("a")
    world.enter("b")
    world.room.leave(world.keys["a"])
    world.room.leave(world.keys["a"])
    world.places = 2
    world.loop.after(1.0)
    assert world.served == ["b"]
    assert world.refused == []


def test_an_end_turns_all_away() -> None:
    world = World()
    world.enter("a")
    world.enter("b")
    world.room.close()
    assert world.refused == [("a", Refusal.NO_WAITING), ("b", Refusal.NO_WAITING)]
    assert (len(world.room), world.loop.armed) == (0, 0)


Step = tuple[str, int]


STEPS = st.tuples(st.sampled_from(["enter", "leave", "place", "wake", "wait"]), st.integers(0, 9))


@given(st.lists(STEPS, max_size=60))
def test_each_that_enters_leaves_once(steps: list[Step]) -> None:
    world, left = World(), 0
    for number, (what, size) in enumerate(steps):
        if what == "enter":
            world.enter(f"r{number}", priority=size % 3)
        elif what == "leave" and world.keys:
            before = len(world.room)
            world.room.leave(list(world.keys.values())[size % len(world.keys)])
            left += before - len(world.room)
        elif what == "place":
            world.places += size % 2
        elif what == "wake":
            world.room.wake()
        else:
            world.loop.after(size / 5)
    world.loop.after(60.0)
    names = [*world.served, *[name for name, _ in world.refused]]
    assert len(names) == len(set(names))
    assert len(names) + left == len(world.keys)
    assert (len(world.room), world.loop.armed) == (0, 0)


def test_two_changes_in_one_turn_are_one_look() -> None:
    world = World()
    world.enter("a")
    world.room.wake()
    world.room.wake()
    assert world.loop.armed == 1
