"""The lender's side: which replicas to offer, when to withdraw an offer, when to recall, when to send a loan home.

Level-triggered: each pass compares what is away with what the router says may be (`Supply`), so a lost message or a
restart changes nothing for long.

    offer     a gang waits that fits with k more replicas, k ≤ lendable - away - offered, held for `surplus_hold_s`
              since the lender was last short of any card,
              and k ≤ spare - loans that stay - offered: none that would be recalled as soon as it is lent;
              and no more out than a recall by hand has left out, for `recall_keep_s` after it
    withdraw  an offer is older than `offer_ttl_s`, wanted by nobody, or more than either
    recall    spare < loans that stay: the difference, by `allocator.recall`, due in the loan's grace
    give back no run on it for `idle_return_s`, and no waiting gang has its reservation there
"""

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from allocator.estimate import duration_s, expected_end_s, lost_unit_s
from allocator.events import ClaimMade, Event, LoanGivenBack, LoanOffered, LoanRecalled, LoanWithdrawn
from allocator.loan.loan import Loan
from allocator.loan.states import AWAY, LoanState
from allocator.model.inventory import Backend, BackendState, Kept, Supply
from allocator.model.jobs import JobState, Run
from allocator.model.pools import PoolKind
from allocator.model.world import Claim, World
from allocator.picture import Free
from allocator.placement.topology import grouped, joined, without
from allocator.queueing.bench import Bench, memory_fits, why
from allocator.queueing.fitting import could_fit_in_time, may_borrow, place_near_data
from allocator.queueing.passing import Waiting
from allocator.reasons import Pending, Reason
from allocator.recall import choose_cells

BY_HAND = frozenset({Reason.OPERATOR, Reason.P99_EMERGENCY})
"""Reasons of recalls that people order."""
JOBS_OFFERED_TO = 8
"""Waiting jobs that a pass searches replicas for: that is the dearest part of a pass. Who has nothing to hope for from
any lender does not count among them."""


def staying(world: World, pool: str, card: str) -> list[Loan]:
    """Loans that are out and not on their way home."""
    return [loan for loan in _loans_of(world, pool, card)
            if loan.state is LoanState.LENT and loan.recall_deadline_s is None]


def away(world: World, pool: str, card: str) -> int:
    """Replicas that the lender does without, those on their way home included."""
    return sum(loan.state in AWAY for loan in _loans_of(world, pool, card))


def offered(world: World, pool: str, card: str) -> list[Loan]:
    return [loan for loan in _loans_of(world, pool, card) if loan.state is LoanState.OFFERED]


def _loans_of(world: World, pool: str, card: str) -> Sequence[Loan]:
    known: dict[tuple[str, str], list[Loan]] | None = world.memo.get("out")
    if known is None:
        known = world.memo["out"] = {}
        for loan in world.loans.values():
            known.setdefault((loan.lender, loan.card), []).append(loan)
    return known.get((pool, card), ())


def keeps(world: World, pool: str, card: str, now_s: float) -> Kept | None:
    """What a recall by hand keeps with its lender at this time."""
    kept = world.kept.get((pool, card))
    return kept if kept is not None and now_s < kept.until_s else None


def _may_go(world: World, supply: Supply, now_s: float) -> int:
    """How many more may be away now, offers among them, by both figures of the lender and what people have said."""
    out = len(staying(world, supply.pool, supply.card))
    kept = keeps(world, supply.pool, supply.card, now_s)
    by_hand = [kept.most_out - out] if kept is not None else []
    return min(supply.lendable - away(world, supply.pool, supply.card), max(0, supply.spare) - out, *by_hand)


def recall_slack(world: World, now_s: float) -> Iterator[Event]:
    """Recalls for each lender that will need more than it has within the recall lead."""
    for (pool, card), supply in world.supplies.items() if world.loans else ():
        out = staying(world, pool, card)
        short = len(out) - max(0, supply.spare)
        if short > 0:
            yield from recall(world, now_s, out, short, Reason.SLACK_NEGATIVE)


def recall(world: World, now_s: float, among: list[Loan], replicas: int, reason: Reason,
           grace_s: float | None = None) -> list[Event]:
    """Recalls of so many of these loans, chosen for the least lost work. Also the operator's "so many back".

    Less grace than was promised is for `Reason.P99_EMERGENCY` alone; with any other reason the event is refused.
    """
    by_device = {device: loan for loan in among for device in loan.devices}
    lies_on: dict[str, set[str]] = {}
    for device, run in world.holders.items():
        if device in by_device:
            lies_on.setdefault(run, set()).add(by_device[device].id)
    weights = {run: at_stake(world, world.runs[run], by_device, now_s, among) for run in lies_on}
    chosen = choose_cells(replicas, {loan.id: 1.0 for loan in among}, weights, lies_on)
    by_id = {loan.id: loan for loan in among}
    return [LoanRecalled(at_s=now_s, loan=name, epoch=by_id[name].epoch,
                         deadline_s=now_s + (by_id[name].grace_s if grace_s is None else grace_s),
                         by_hand=reason in BY_HAND,
                         why=why(world, reason, f"{replicas} of {len(among)} {by_id[name].card} replicas"))
            for name in chosen]


def at_stake(world: World, run: Run, by_device: dict[str, Loan], now_s: float, among: list[Loan]) -> float:
    """What a recall loses of this run: nothing where it ends in time by itself, leaves anyway, or can do with less."""
    soonest_s = now_s + min((loan.grace_s for loan in among), default=0.0)
    if run.stopping or expected_end_s(run, now_s) <= soonest_s - world.config.rules.kill_margin_s:
        return 0.0
    held = sum(device in by_device for device in run.devices)
    return 0.0 if len(run.devices) - held >= run.gang_min else lost_unit_s(world, run, now_s)


def withdraw(world: World, now_s: float) -> Iterator[Event]:
    """Offers that have waited too long, or that the lender can no longer afford."""
    gone: set[str] = set()
    for loan in world.loans.values():
        if loan.state is LoanState.OFFERED and now_s >= loan.offered_s + world.config.rules.offer_ttl_s:
            gone.add(loan.id)
            yield _withdrawn(world, loan, now_s, Reason.OFFER_EXPIRED)
    for (pool, card), supply in world.supplies.items() if world.loans else ():
        pending = [loan for loan in offered(world, pool, card) if loan.id not in gone]
        over = len(pending) - _may_go(world, supply, now_s)
        for loan in sorted(pending, key=lambda loan: -loan.epoch)[:max(0, over)]:
            yield _withdrawn(world, loan, now_s, Reason.SURPLUS_GONE)


def withdraw_unwanted(world: World, now_s: float) -> Iterator[Event]:
    """Offers that no claim waits for any more."""
    wanted = {name for claim in world.claims.values() for name in claim.loans}
    for loan in world.loans.values():
        if loan.state is LoanState.OFFERED and loan.id not in wanted:
            yield _withdrawn(world, loan, now_s, Reason.NOT_WANTED)


def _withdrawn(world: World, loan: Loan, now_s: float, reason: Reason) -> Event:
    return LoanWithdrawn(at_s=now_s, loan=loan.id, epoch=loan.epoch, why=why(world, reason))


def give_back(world: World, now_s: float, reserved: Set[str] = frozenset()) -> Iterator[Event]:
    """Loans that nobody has used for a while. On `reserved` devices a waiting gang counts: to send them home would move
    its start (I12), and by the loan's promise it is done before the lender wants them.
    """
    for loan in world.loans.values():
        if (loan.state is LoanState.LENT and loan.idle_since_s is not None and world.is_empty(loan.devices)
                and now_s - loan.idle_since_s >= world.config.rules.idle_return_s
                and not any(device in world.claimed or device in reserved for device in loan.devices)):
            yield LoanGivenBack(at_s=now_s, loan=loan.id, epoch=loan.epoch, why=why(world, Reason.IDLE))


@dataclass(slots=True)
class _Lender:
    supply: Supply
    candidates: list[Backend]
    may: int


def offer(bench: Bench, blocked: list[Waiting]) -> list[Event]:
    """Offers, each with the claim of the gang that they are for. One gang's offers come together or not at all."""
    if bench.pool.kind is not PoolKind.TRAINING or not blocked:
        return []
    lenders: dict[str, list[_Lender]] = {}
    for lender in _lenders(bench.world, bench.now_s):
        lenders.setdefault(lender.supply.card, []).append(lender)
    events: list[Event] = []
    searched = 0
    for waiting in blocked if lenders else ():
        hopes = [(card, lender) for card in waiting.cards for lender in lenders.get(card, ())
                 if _might_do(bench, waiting.state, card, lender)]
        if not hopes:
            continue
        searched += 1
        events += next((made for card, lender in hopes if (made := _offer_for(bench, waiting.state, card, lender))), [])
        if searched == JOBS_OFFERED_TO:
            break
    return events


def _might_do(bench: Bench, state: JobState, card: str, lender: _Lender) -> bool:
    """Whether a search can come to anything, by count: the job may borrow, and all that may be lent makes a gang."""
    count = sum(map(len, bench.free.get(card, {}).values())) + sum(map(len, bench.lent.get(card, {}).values()))
    count += sum(sorted((len(backend.devices) for backend in lender.candidates), reverse=True)[:lender.may])
    return (lender.may > 0 and count >= state.job.gang_min
            and may_borrow(bench, state, duration_s(bench.world, state, card, state.job.gang_min))
            and could_fit_in_time(bench, state, card))


def _lenders(world: World, now_s: float) -> Iterator[_Lender]:
    rules = world.config.rules
    for (pool, card), supply in world.supplies.items():
        lender = world.config.pool(pool)
        if (lender is None or lender.kind is not PoolKind.INFERENCE
                or not now_s - supply.at_s <= rules.supply_fresh_s):
            continue
        held = sum(now_s - since_s >= rules.surplus_hold_s for since_s in supply.held_since_s)
        may = min(held - away(world, pool, card), _may_go(world, supply, now_s)) - len(offered(world, pool, card))
        if may <= 0:
            continue
        candidates = [backend for backend in world.backends.values()
                      if (backend.pool, backend.card, backend.state) == (pool, card, BackendState.SERVING)
                      and backend.name not in world.loans and _lendable(world, backend)]
        if candidates:
            yield _Lender(supply, sorted(candidates, key=lambda backend: (_where(world, backend), backend.name)), may)


class HeldBack(NamedTuple):
    """Why a lender offers no more of a card, and until when that is sure to be so."""

    code: Pending
    until_s: float


def held_back(world: World, supply: Supply, now_s: float) -> HeldBack | None:
    """What keeps a lender from offering one more; `None` where nothing does."""
    rules, pool, card = world.config.rules, supply.pool, supply.card
    out, pending, gone = len(staying(world, pool, card)), len(offered(world, pool, card)), away(world, pool, card)
    most = min(supply.lendable - gone, max(0, supply.spare) - out)
    if most <= pending or now_s - supply.at_s > rules.supply_fresh_s:
        return HeldBack(Pending.NO_SURPLUS, inf)
    kept = keeps(world, pool, card, now_s)
    if kept is not None and kept.most_out <= out + pending:
        return HeldBack(Pending.KEPT_BY_HAND, kept.until_s)
    holds_s = supply.held_since_s[gone + pending] + rules.surplus_hold_s
    return HeldBack(Pending.SURPLUS_NEW, holds_s) if holds_s > now_s else None


def _lendable(world: World, backend: Backend) -> bool:
    return world.is_empty(backend.devices) and not any(
        device in world.conditions or device in world.loaned for device in backend.devices)


def _where(world: World, backend: Backend) -> tuple[str, str, str]:
    node = world.nodes[backend.devices[0].rpartition(":")[0]]
    return (node.pod, node.leaf, node.name)


def _offer_for(bench: Bench, state: JobState, card: str, lender: _Lender) -> list[Event]:
    """The offers of the fewest neighbouring replicas with which the gang fits; none where it does not."""
    job, rules = state.job, bench.world.config.rules
    reserved = [device for other in bench.reservations.get(card, ()) if other.job != job.id for device in other.devices]
    free = memory_fits(bench.nodes, without(joined(bench.free.get(card, {}), bench.lent.get(card, {})), reserved),
                       job.memory_gb)
    here = sum(map(len, free.values()))
    for count in range(1, min(lender.may, len(lender.candidates)) + 1):
        for first in range(len(lender.candidates) - count + 1):
            backends = lender.candidates[first:first + count]
            brought = [device for backend in backends for device in backend.devices]
            if here + len(brought) < job.gang_min:
                continue
            together = joined(free, memory_fits(bench.nodes, grouped(brought), job.memory_gb))
            devices = place_near_data(bench, state, together, job.gang_min)
            if devices is not None and _used(backends, devices) and _admits_with(bench, state, card, len(brought)):
                lender.may -= count
                lender.candidates = [other for other in lender.candidates if other not in backends]
                devices = _as_large_as_can_be(bench, state, card, together, devices)
                return _offers(bench, state, card, backends, devices, rules.offer_ttl_s)
    return []


def _as_large_as_can_be(bench: Bench, state: JobState, card: str, together: Free,
                        devices: tuple[str, ...]) -> tuple[str, ...]:
    """An elastic gang takes all that comes with the replicas that it needs anyway."""
    job = state.job
    size = min(job.gang_max, sum(map(len, together.values())))
    if size <= len(devices) or not bench.ledger.admits(job.queue, card, job.family, size):
        return devices
    return place_near_data(bench, state, together, size) or devices


def _used(backends: Iterable[Backend], devices: tuple[str, ...]) -> bool:
    """Whether the gang stands on each of them: an offer that it does not need would come for nothing."""
    return all(not set(devices).isdisjoint(backend.devices) for backend in backends)


def _admits_with(bench: Bench, state: JobState, card: str, brought: int) -> bool:
    job = state.job
    bench.ledger.grow(card, brought)
    if bench.ledger.admits(job.queue, card, job.family, job.gang_min):
        return True
    bench.ledger.grow(card, -brought)
    return False


def _offers(bench: Bench, state: JobState, card: str, backends: list[Backend], devices: tuple[str, ...],
            ttl_s: float) -> list[Event]:
    world, rules, job = bench.world, bench.world.config.rules, state.job
    events: list[Event] = []
    for backend in backends:
        bench.epoch += 1
        loan = Loan(
            id=backend.name, epoch=bench.epoch, lender=backend.pool, borrower=bench.pool.name, card=card,
            devices=backend.devices, promised_min_s=rules.promised_min_s, grace_s=rules.grace_s,
            coefficients=world.active, offered_s=bench.now_s)
        events.append(LoanOffered(at_s=bench.now_s, loan=loan, why=bench.why(Reason.SURPLUS, f"for {job.id}")))
    claim = Claim(job.id, bench.pool.name, card, devices, bench.now_s, bench.now_s + ttl_s,
                  tuple(backend.name for backend in backends))
    events.append(ClaimMade(at_s=bench.now_s, claim=claim, why=bench.why(Reason.SURPLUS)))
    bench.take(card, devices, None)
    bench.ledger.use(job.queue, card, job.family, len(devices))
    return events
