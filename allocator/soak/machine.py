"""One seed of the soak: so many happenings, each followed by a plan, all steps checked, and the journal replayed."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from random import Random

from allocator.apply import apply, consider, replay
from allocator.events import DECIDED, ClaimMade, Event, LoanRecalled, from_json, to_json
from allocator.invariants import Violation, step_violations, violations
from allocator.loan.states import LoanState
from allocator.model.world import World
from allocator.plan import plan, survey
from allocator.queueing.bench import Reservation
from allocator.reasons import Reason
from allocator.soak.outside import happening, random_world, replies

STRIDES_S = (0.0, 0.2, 1.0, 1.0, 5.0, 20.0, 60.0)
OLD_NEWS = 0.05
"""Share of reports that are repeated later, in another world than they were meant for."""
LOOK_CLOSELY = 8
"""One step of so many is planned twice, and its reservations compared."""


@dataclass(slots=True)
class Seed:
    """What one seed came to."""

    seed: int
    found: list[str] = field(default_factory=list)
    """Violations, each with the step at which it was seen."""
    events: int = 0
    placed: int = 0
    lent: int = 0
    recalled: int = 0
    returned: int = 0
    overdue: int = 0
    reclaimed: int = 0


def run_seed(seed: int, steps: int) -> Seed:
    """Runs one seed. Deterministic: the same seed gives the same journal."""
    rng, result = Random(seed), Seed(seed)
    first, filling = random_world(rng)
    world, now_s = replay(first, filling), 0.0
    journal: list[Event] = list(filling)
    marks: list[tuple[int, World]] = []
    for count in range(steps):
        now_s = _let_pass(world, now_s, rng)
        news = [*replies(world, now_s, rng), *happening(world, now_s, rng, count)]
        if rng.random() < OLD_NEWS and not isinstance(old := rng.choice(journal), DECIDED):
            news.append(old)
        for event in news:
            world = _step(world, event, journal, result, count)
        world = _planned(world, now_s, journal, result, count)
        for found in violations(world):
            result.found.append(f"step {count}: {found.rule} {found.detail}")
        if rng.random() < 0.02:
            marks.append((len(journal), world))
        if len(result.found) > 20:
            break
    result.events = len(journal)
    _replay(first, journal, [*marks, (len(journal), world)], result)
    return result


def _let_pass(world: World, now_s: float, rng: Random) -> float:
    """The next time: some stride on, but never past a deadline without a tick at it."""
    later_s = now_s + rng.choice(STRIDES_S)
    margin_s = world.config.rules.kill_margin_s
    ahead = [due_s for loan in world.loans.values() if (due_s := loan.recall_deadline_s) is not None and due_s > now_s]
    ahead += [at_s for run in world.runs.values() if run.stop_by_s is not None
              and (at_s := run.stop_by_s - margin_s) > now_s]
    return min([later_s, *ahead])


def _step(world: World, event: Event, journal: list[Event], result: Seed, count: int) -> World:
    after = consider(world, event)
    if isinstance(after, str):
        return world
    _look(world, event, after, result, count)
    journal.append(event)
    return after


def _look(before: World, event: Event, after: World, result: Seed, count: int) -> None:
    for found in step_violations(before, event, after):
        result.found.append(f"step {count}, {type(event).__name__}: {found.rule} {found.detail}")
    name = type(event).__name__
    result.placed += name == "RunPlaced"
    result.reclaimed += isinstance(event, ClaimMade) and event.why.reason is Reason.RECLAIMED
    result.overdue += name == "LoanOverdue"
    if before.loans is after.loans:
        return
    for key, loan in before.loans.items():
        then = after.loans.get(key)
        result.returned += then is None and loan.state in (LoanState.RETURNING, LoanState.OVERDUE)
        result.lent += then is not None and then.state is LoanState.LENT and loan.state is LoanState.OFFERED
        result.recalled += (then is not None and then.recall_deadline_s is not None
                            and loan.recall_deadline_s is None)


def _planned(world: World, now_s: float, journal: list[Event], result: Seed, count: int) -> World:
    # Both checks cost as much as a plan, so the dice choose when; over all seeds there are enough of them.
    closely = hash((result.seed, count)) % LOOK_CLOSELY == 0
    planned = plan(world, now_s)
    shadows = _shadows(replay(world, _recalls(planned.events)), now_s) if closely else {}
    for event, refusal in planned.refused:
        result.found.append(f"step {count}: the planner proposed {type(event).__name__}, refused: {refusal}")
    for event in planned.events:
        world = _step(world, event, journal, result, count)
    if closely and (again := plan(world, now_s).events):
        result.found.append(f"step {count}: P57 a second plan adds {[type(event).__name__ for event in again]}")
    if shadows:
        result.found += [f"step {count}: {found.rule} {found.detail}"
                         for found in shadow_violations(shadows, _shadows(world, now_s))]
    return world


def _recalls(events: Iterable[Event]) -> Iterator[Event]:
    """What the lender takes back, and a gang that counted on it must do without; that is no start's doing."""
    return (event for event in events if isinstance(event, LoanRecalled))


def _shadows(world: World, now_s: float) -> dict[str, Reservation]:
    """Card → the reservation of the gang that waits first."""
    return {found.card: found for found in reversed(survey(world, now_s).reservations)}


def shadow_violations(before: Mapping[str, Reservation], after: Mapping[str, Reservation]) -> list[Violation]:
    """I12: what a plan starts never moves the start of the gang that waits first."""
    found = []
    for card, was in before.items():
        now = after.get(card)
        if now is not None and now.job == was.job and now.at_s > was.at_s + 1e-6:
            found.append(Violation("I12", f"{card}: job {was.job} moves from {was.at_s} to {now.at_s}"))
    return found


def _replay(first: World, journal: list[Event], marks: list[tuple[int, World]], result: Seed) -> None:
    """Each marked prefix of the journal, by way of JSON, gives the world of its moment."""
    world, done = first, 0
    for length, expected in marks:
        for event in journal[done:length]:
            world = apply(world, from_json(to_json(event)) if result.seed % 10 == 0 else event)
        done = length
        if world != expected:
            result.found.append(f"replay of {length} events gives another world")
            return
