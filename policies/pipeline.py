"""One routing decision: filter, price, pick.

1. Each filter in turn may reject a backend, with a word of `filters.Rejection`.
2. *Soft* words send the request elsewhere first: where nobody else is left, backends that are backing off come back
   in, and after them those that already failed this request. One that did both stays out.
3. Each candidate is priced: `price = Σ terms / (weight · ramp)`. An operator's weight of 2 accepts twice the price,
   for money and delay alike, and a backend that starts slowly is dearer by as much as its share is smaller.
4. Each is held against the caller's budget (`estimate.lateness_s`).
5. The picker chooses, and says why.

Candidates are ordered by name, so the order of the fleet file decides nothing. The decision is total: a price that is
not a number counts as infinite, and no candidates is an answer.
"""

from collections import Counter
from collections.abc import Sequence
from math import inf
from operator import attrgetter

from backends.catalog.views import BackendView, FleetView
from policies.estimate import lateness_s, predict
from policies.facts import RequestFacts
from policies.filters import SOFT, Rejection
from policies.policy import Decision, Pipeline, Priced, Rejected, Rng

MAX_REASON_CHARS = 119

by_name = attrgetter("spec.name")


def decide(pipeline: Pipeline, facts: RequestFacts, fleet: FleetView, now: float, rng: Rng) -> Decision:
    """Where this request goes and why. Total and pure: same arguments and dice, same decision.

    `reason` is a short ASCII phrase, fit for a response header: `cheapest price=0.00012 of 3`, `only candidate`,
    `no backend: unhealthy 2, context_too_small 1`.
    """
    views, rejected = _sift(pipeline, facts, fleet, now)
    candidates = tuple([_priced(pipeline, facts, view, now) for view in views])
    if not candidates:
        return Decision(pipeline.name, None, _nobody(rejected), None, (), rejected, fleet.config_hash)
    if len(candidates) == 1:
        chosen, reason = candidates[0], "only candidate"
    else:
        chosen, reason = pipeline.picker(facts, candidates, fleet, now, rng)
    price = chosen.price if pipeline.prices else None
    return Decision(pipeline.name, chosen.backend, reason[:MAX_REASON_CHARS], price, candidates, rejected,
                    fleet.config_hash)


def _sift(
    pipeline: Pipeline, facts: RequestFacts, fleet: FleetView, now: float
) -> tuple[Sequence[BackendView], tuple[Rejected, ...]]:
    """The backends that may serve, in order of name, and the others with the word that passed them over."""
    filters, tried = pipeline.filters, facts.tried
    clear: list[BackendView] = []
    soft: list[tuple[BackendView, str]] = []
    rejected: list[Rejected] = []
    for view in sorted(fleet.backends, key=by_name):
        word: str | None = Rejection.ALREADY_TRIED if tried and view.spec.name in tried else None
        for part in filters:
            said = part(facts, view, fleet, now)
            if said is None:
                continue
            # Two soft words make a hard one: whoever failed this request by asking for silence is not asked again.
            if said not in SOFT or word is not None:
                rejected.append(Rejected(view.spec.name, said))
                break
            word = said
        else:
            if word is None:
                clear.append(view)
            else:
                soft.append((view, word))
    if not soft:
        return clear, tuple(rejected)
    # Its own failure on this request weighs more against a backend than its plea for silence.
    resting = [view for view, word in soft if word != Rejection.ALREADY_TRIED]
    chosen = clear or resting or [view for view, _ in soft]
    rejected += [Rejected(view.spec.name, word) for view, word in soft if view not in chosen]
    return chosen, tuple(sorted(rejected, key=attrgetter("backend")))


def _priced(pipeline: Pipeline, facts: RequestFacts, view: BackendView, now: float) -> Priced:
    prices, margin = pipeline.prices, pipeline.margin
    if not prices and margin is None:
        return Priced(view, 0.0)
    estimate = predict(facts, view, now)
    share = view.spec.weight * view.health.ramp(now)
    # A weight of 0 drains and never gets here from a fleet file; one that does is dearer than anything.
    terms = [(part.name, part(facts, view, estimate, now) / share if share > 0.0 else inf) for part in prices]
    price = sum([term for _, term in terms])
    late_s = lateness_s(facts, estimate, margin) if margin is not None else 0.0
    return Priced(view, price if price == price else inf, tuple(terms), late_s if late_s == late_s else inf, estimate)


def _nobody(rejected: tuple[Rejected, ...]) -> str:
    if not rejected:
        return "no backend: the fleet is empty"
    counts = Counter([str(rejection.reason) for rejection in rejected])
    return ("no backend: " + ", ".join(f"{word} {count}" for word, count in sorted(counts.items())))[:MAX_REASON_CHARS]
