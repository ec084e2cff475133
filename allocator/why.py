"""Why a job waits: the first thing that would have to change, as a code, its figures, and a sentence."""

from dataclasses import dataclass
from math import inf, isfinite

from allocator.lending import held_back
from allocator.model.pools import PoolKind, pool_of_queue
from allocator.model.world import World
from allocator.picture import picture_of
from allocator.plan import survey
from allocator.queueing.bench import Verdict
from allocator.reasons import Pending


@dataclass(frozen=True, slots=True)
class Answer:
    job: str
    code: Pending
    facts: dict[str, object]
    sentence: str


def why_pending(world: World, job: str, now_s: float) -> Answer | None:
    """The answer for one job; `None` where no such job is known."""
    state = world.jobs.get(job)
    if state is None:
        return None
    if state.run is not None:
        return answer(Verdict(job, Pending.NOT_WAITING, {"run": state.run}), now_s)
    return answer(verdicts(world, now_s).get(job, Verdict(job, Pending.NEXT_TICK)), now_s)


def verdicts(world: World, now_s: float) -> dict[str, Verdict]:
    """Why each waiting job waits. Who lacks devices that only a lender has is told what keeps them there."""
    return {name: _of_lenders(world, verdict, now_s) for name, verdict in survey(world, now_s).verdicts.items()}


def _of_lenders(world: World, verdict: Verdict, now_s: float) -> Verdict:
    if verdict.code is not Pending.DEVICES_BUSY:
        return verdict
    job, card = world.jobs[verdict.job].job, str(verdict.facts["card"])
    pool = pool_of_queue(world.config, job.queue)
    if (pool is None or pool.kind is not PoolKind.TRAINING
            or picture_of(world, now_s).capacity(pool.name, card) >= job.gang_min):
        return verdict
    found = [held_back(world, supply, now_s) for (_, of), supply in world.supplies.items() if of == card]
    if None in found:
        return verdict
    kept = min((back for back in found if back is not None and back.code is not Pending.NO_SURPLUS),
               key=lambda back: back.until_s, default=None)
    facts = {**verdict.facts, "lendable": sum(supply.lendable for (_, of), supply in world.supplies.items()
                                              if of == card)}
    return (Verdict(verdict.job, Pending.NO_SURPLUS, facts) if kept is None
            else Verdict(verdict.job, kept.code, {**facts, "at_s": kept.until_s}))


def answer(verdict: Verdict, now_s: float) -> Answer:
    facts = dict(verdict.facts)
    words: dict[str, object] = {**dict.fromkeys(_FIELDS, "?"), **facts}
    for key in ("at_s", "until_s"):
        value = facts.get(key)
        words[f"in_{key}"] = _span(value - now_s if isinstance(value, float) else inf)
    for key in ("takes_s", "promised_s", "restart_s"):
        words[key] = _length(facts.get(key))
    words["by_what"] = ("as is assumed without `work_unit_s`" if facts.get("is_assumed") else "by its `work_unit_s`")
    words["in_s"] = _span(facts["in_s"] if isinstance(facts.get("in_s"), float) else inf)
    if isinstance(facts.get("available"), float):
        words["available"] = f"{facts['available']:g}"
    sentence = _SENTENCES[verdict.code].format_map(words)
    if "; " in str(facts.get("rejected", "")):
        sentence += f" (By card: {facts['rejected']}.)"
    return Answer(verdict.job, verdict.code, facts, sentence)


def _span(seconds: object) -> str:
    if not isinstance(seconds, float) or not isfinite(seconds):
        return "at a time that nobody knows yet"
    return f"in about {_length(seconds)}"


def _length(seconds: object) -> str:
    if not isinstance(seconds, float) or not isfinite(seconds):
        return "?"
    if seconds < 120.0:
        return f"{max(0.0, seconds):.0f} s"
    return f"{seconds / 60.0:.0f} min" if seconds < 7200.0 else f"{seconds / 3600.0:.1f} h"


_FIELDS = ("queue", "pool", "card", "needs", "family", "memory_gb", "have", "lendable", "healthy", "available",
           "free", "widest", "job", "instead_of", "devices", "run", "rejected", "recalls",
           "crashes", "tries")

_ONLY_LENT = "Of its own the pool has {have} {card} for the {needs} that it needs, and lent ones are not for it: "
_SENTENCES = {
    Pending.NOT_WAITING: "It is not waiting: run {run} holds devices.",
    Pending.QUEUE_UNKNOWN: "Queue {queue} is not declared: declare it, or submit to another.",
    Pending.NO_JOBS_HERE: "Queue {queue} leads to pool {pool}, which runs no jobs: submit to a training pool.",
    Pending.CARD_UNKNOWN: "Card {card} is not in the coefficients in force: measure it, or use its name there.",
    Pending.CARD_CANNOT: "Card {card} was measured not to run {family} with {needs} devices: allow another card.",
    Pending.MEMORY: "No {card} has {memory_gb} GB: ask for less memory, or allow another card.",
    Pending.NO_SUCH_CARD: "Pool {pool} has no {card} and may borrow none: allow another card.",
    Pending.GANG_TOO_LARGE: "It needs {needs} {card}, the pool has {have} and could borrow {lendable}, and no {widest} "
                            "holds so many with its memory: ask for fewer.",
    Pending.NOT_HEALTHY: "It needs {needs} {card}, only {healthy} are healthy: nodes have to come back.",
    Pending.LOAN_TOO_SHORT: _ONLY_LENT + "it takes {takes_s}, {by_what}, cannot save, and loans are promised for "
                            "{promised_s}. Give it a checkpoint, or a shorter estimate where that is true.",
    Pending.LOAN_NOT_WORTH: _ONLY_LENT + "of {promised_s} promised at most, and {takes_s} of work, {restart_s} go with "
                            "its restart. Shorten that, or lower `rules.min_loan_worth`.",
    Pending.RECALLED_TOO_OFTEN: _ONLY_LENT + "it was recalled {recalls} times. Raise `rules.max_recalls`, or allow "
                                "another card.",
    Pending.POOL_CLOSED: "Pool {pool} is outside of its dates.",
    Pending.WINDOW_CLOSED: "None of its time windows is open: the next one opens {in_at_s}.",
    Pending.CRASHED: "It has crashed {crashes} times and has {tries} tries in all: the next one is {in_at_s}.",
    Pending.QUOTA_LIMIT: "It needs {needs} {card}, more than the quotas ever leave to queue {queue}: raise its own, or "
                         "let others lend more.",
    Pending.QUOTA_BUSY: "Queue {queue} may take {available} more of {card}, it needs {needs}: its own jobs must end.",
    Pending.QUOTA_KEPT: "{free} {card} are free, but kept for the guarantees of other queues than {queue}.",
    Pending.CLAIM: "{devices} {card} are kept for it and are being freed.",
    Pending.DEVICES_BUSY: "It needs {needs} {card}, {free} are free: enough are expected {in_at_s}.",
    Pending.NO_SURPLUS: "It needs {needs} {card}, {free} are free, and inference can spare no more: it lends "
                        "{lendable} replicas at most.",
    Pending.SURPLUS_NEW: "It needs {needs} {card}, {free} are free; what inference can spare is lent once that has "
                         "held for a while, {in_at_s}.",
    Pending.KEPT_BY_HAND: "It needs {needs} {card}, {free} are free; what was recalled by hand is kept, and may be "
                          "lent {in_at_s}, or once `headrace supply` says what can be spared.",
    Pending.FRAGMENTED: "{free} {card} are free, but not {needs} within one {widest}.",
    Pending.BEHIND_RESERVATION: "{card} devices are free, but it would delay {job}, which starts {in_at_s}.",
    Pending.BETTER_CARD: "It could start on {instead_of}, but is expected to be done sooner on {card}, {in_s}.",
    Pending.NEXT_TICK: "Nothing is in its way: it starts with the next pass.",
}
