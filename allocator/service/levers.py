"""What people may do by hand: recall, judge devices, take nodes out, say what a lender can do without."""

from typing import Annotated, Any, Literal

from pydantic import Field

from allocator.events import DevicesJudged, Event, LoanRecalled, NodeDown, NodeUp, SupplyReported
from allocator.lending import recall as choose_recalls
from allocator.lending import staying
from allocator.loan.states import RECALLABLE, LoanState
from allocator.model.inventory import Condition, Supply
from allocator.model.world import World
from allocator.queueing.bench import why
from allocator.reasons import Reason
from allocator.service.fields import Count, Seconds
from allocator.service.keeper import Keeper
from allocator.service.lender import Lender
from allocator.service.refusals import ApiError
from settings.fields import Name, Section, Text


class Recall(Section):
    """`POST /v1/recall`."""

    target: Name = Field(description="A loan (the backend's name) or a pool: the lender's, all of its loans.")
    deadline_s: Seconds | None = Field(default=None, description="From now; left out: the promised grace.")
    replicas: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="Of a pool: so many, those that lose the least work; left out: all.")
    card: Name | None = Field(default=None, description="Of a pool: only this card.")
    emergency: bool = Field(default=False, description="The lender's budget is breached now: less than the promised "
                                                       "grace is allowed.")


class NodeState(Section):
    """`POST /v1/nodes/{name}`."""

    state: Literal["down", "up"]


class Devices(Section):
    """`POST /v1/devices`."""

    devices: Annotated[tuple[Text, ...], Field(min_length=1, max_length=10_000, strict=False)]
    condition: Literal["healthy", "cordoned", "quarantined"]
    evidence: str = Field(default="", max_length=500, description="How it is known that they are idle and sound.")


class SupplyBody(Section):
    """`PUT /v1/supply`."""

    pool: Name
    card: Name
    lendable: Count
    spare: Annotated[int, Field(ge=-1_000_000, le=1_000_000)]


async def recall(keeper: Keeper, asked: Recall) -> dict[str, Any]:
    """Recalls what was named; the loans with their deadlines as they stand now.

    Raises:
        ApiError: nothing of that name is lent, or the recall changes nothing.
    """
    names: list[str] = []

    def make(world: World) -> list[Event]:
        events = _recalls(world, asked, keeper.clock.now_s())
        names.extend(event.loan for event in events if isinstance(event, LoanRecalled))
        return events

    outcome = await keeper.decide(make)
    if outcome.refused and not outcome.taken:
        raise ApiError(409, "refused", "; ".join(text for _, text in outcome.refused))
    now_s = keeper.clock.now_s()
    found = []
    for name in names:
        loan = keeper.world.loans.get(name)
        due_s = loan.recall_deadline_s if loan else None
        found.append({"loan": name, "state": loan.state.value if loan else "over",
                      "due_in_s": None if due_s is None else due_s - now_s})
    return {"recalled": found, "refused": [text for _, text in outcome.refused],
            "kept_for_s": keeper.world.config.rules.recall_keep_s}


def _recalls(world: World, asked: Recall, now_s: float) -> list[Event]:
    reason = Reason.P99_EMERGENCY if asked.emergency else Reason.OPERATOR
    loan = world.loans.get(asked.target)
    if loan is not None:
        if loan.state is LoanState.OFFERED or loan.state in RECALLABLE:
            by_s = now_s + (loan.grace_s if asked.deadline_s is None else asked.deadline_s)
            return [LoanRecalled(at_s=now_s, loan=loan.id, epoch=loan.epoch, deadline_s=by_s, by_hand=True,
                                 why=why(world, reason))]
        raise ApiError(409, "not_recallable", f"Loan {loan.id} is {loan.state.value}; there is nothing to recall.")
    if world.config.pool(asked.target) is None:
        known = ", ".join(sorted({*world.loans, *(pool.name for pool in world.config.pools)}))
        raise ApiError(404, "unknown_target", f"There is no loan and no pool {asked.target}. Known: {known}.")
    # Whoever wants all of it back wants no more to go, either.
    events: list[Event] = [
        LoanRecalled(at_s=now_s, loan=one.id, epoch=one.epoch, deadline_s=now_s + one.grace_s, by_hand=True,
                     why=why(world, reason))
        for one in world.loans.values() if asked.replicas is None and one.state is LoanState.OFFERED
        and one.lender == asked.target and asked.card in (None, one.card)]
    cards = {one.card for one in world.loans.values() if one.lender == asked.target and asked.card in (None, one.card)}
    for card in sorted(cards):
        out = staying(world, asked.target, card)
        count = len(out) if asked.replicas is None else min(asked.replicas - len(events), len(out))
        if count > 0:
            events += choose_recalls(world, now_s, out, count, reason, asked.deadline_s)
    if not events:
        raise ApiError(409, "nothing_lent", f"Pool {asked.target} has lent nothing that is not on its way home.")
    return events


async def set_node(keeper: Keeper, name: str, asked: NodeState) -> None:
    """A node is down, or answers again. Raises ApiError."""
    now_s = keeper.clock.now_s()
    event: Event = (NodeDown(at_s=now_s, node=name, detail="by hand") if asked.state == "down"
                    else NodeUp(at_s=now_s, node=name))
    await _must(keeper, event)


async def judge(keeper: Keeper, asked: Devices) -> None:
    """Devices cordoned, quarantined, or fit again. Raises ApiError."""
    await _must(keeper, DevicesJudged(at_s=keeper.clock.now_s(), devices=asked.devices,
                                      condition=Condition(asked.condition), evidence=asked.evidence))


async def tell_supply(keeper: Keeper, lender: Lender, asked: SupplyBody) -> None:
    """What an inference pool can do without, until it is told anew; ends what recalls by hand keep back of it.

    Raises ApiError.
    """
    supply = Supply(asked.pool, asked.card, asked.lendable, asked.spare)
    lender.tell(supply)
    await _must(keeper, SupplyReported(at_s=keeper.clock.now_s(), supply=supply, by_hand=True))


async def _must(keeper: Keeper, event: Event) -> None:
    outcome = await keeper.record([event])
    if outcome.refused:
        raise ApiError(409, "refused", outcome.refused[0][1])
