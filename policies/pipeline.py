"""One routing decision: filter, price, pick.

1. Each filter in turn may reject a backend, with a word of `filters.Rejection`.
2. *Soft* words send the request elsewhere first: where nobody else is left, backends that are backing off come back
   in, and after them those that already failed this request. One that did both stays out.
3. Each candidate is priced: `price = Σ terms / (weight · ramp)`. An operator's weight of 2 accepts twice the price,
   for money and delay alike, and a backend that starts slowly is dearer by as much as its share is smaller.
4. Each is held against the caller's budget (`estimate.lateness_s`).
5. The picker chooses, and says why. One that weighs candidates itself does steps 4 and 5, and predicts only as far as
   it must.

Of a fleet larger than the policy's sample a part is looked at, drawn from each kind of backend (`strata`): the others
are neither candidates nor rejected. Where nobody in it may serve, all are looked at.

Candidates are ordered by name, so the order of the fleet file decides nothing. The decision is total: a price that is
not a number counts as infinite, and no candidates is an answer.
"""

from collections import Counter
from collections.abc import Sequence
from math import inf
from operator import attrgetter

from backends.catalog.health import HealthState
from backends.catalog.views import BackendView, FleetView
from policies.estimate import lateness_s, new_tuple, predict
from policies.facts import RequestFacts
from policies.filters import SOFT, Rejection
from policies.policy import Choice, Decision, Pipeline, Priced, Rejected, Rng
from policies.strata import sampled

MAX_REASON_CHARS = 119
HEALTHY = HealthState.HEALTHY

by_name = attrgetter("spec.name")


def decide(pipeline: Pipeline, facts: RequestFacts, fleet: FleetView, now: float, rng: Rng) -> Decision:
    """Where this request goes and why. Total and pure: same arguments and dice, same decision.

    `reason` is a short ASCII phrase, fit for a response header: `cheapest price=0.00012 of 3`, `only candidate`,
    `shed p=0.98 of 4`, `no backend: unhealthy 2, context_too_small 1`.
    """
    views: Sequence[BackendView] = fleet.backends
    if pipeline.sample is not None and len(views) > pipeline.sample:
        views = sampled(pipeline, facts, fleet, rng)
    views, rejected = _sift(pipeline, facts, views, fleet, now)
    if not views and pipeline.sample is not None and len(fleet.backends) > pipeline.sample:
        views, rejected = _sift(pipeline, facts, fleet.backends, fleet, now)
    if not views:
        return Decision(pipeline.name, None, _nobody(rejected), None, (), rejected, fleet.config_hash)
    if pipeline.lazy:
        candidates = _priced_only(pipeline, facts, views, now)
    else:
        candidates = [_priced(pipeline, facts, view, now) for view in views]
    if len(candidates) == 1 and not pipeline.weighs:
        choice = Choice(candidates[0], "only candidate", candidates)
    else:
        answer = pipeline.picker(facts, candidates, fleet, now, rng)
        choice = answer if isinstance(answer, Choice) else Choice(answer[0], answer[1], candidates)
    chosen, reason, weighed, retry_after_s = choice
    if chosen is None:
        return Decision(pipeline.name, None, reason[:MAX_REASON_CHARS], None, tuple(weighed), rejected,
                        fleet.config_hash, retry_after_s)
    price = chosen.price if pipeline.prices else None
    return Decision(pipeline.name, chosen.backend, reason[:MAX_REASON_CHARS], price, tuple(weighed), rejected,
                    fleet.config_hash)


def _sift(
    pipeline: Pipeline, facts: RequestFacts, views: Sequence[BackendView], fleet: FleetView, now: float
) -> tuple[Sequence[BackendView], tuple[Rejected, ...]]:
    """The backends that may serve, in order of name, and the others with the word that passed them over."""
    views = sorted(views, key=by_name)
    clear: Sequence[BackendView] = views
    if facts.tried:
        clear = [view for view in views if view.spec.name not in facts.tried]
    for part in pipeline.filters:
        passing = getattr(part, "passing", None)
        clear = ([view for view in clear if part(facts, view, fleet, now) is None] if passing is None
                 else passing(facts, clear, now))
    if len(clear) == len(views):
        return clear, ()
    return _passed_over(pipeline, facts, views, clear, fleet, now)


def _passed_over(
    pipeline: Pipeline, facts: RequestFacts, views: Sequence[BackendView], clear: Sequence[BackendView],
    fleet: FleetView, now: float
) -> tuple[Sequence[BackendView], tuple[Rejected, ...]]:
    """The words for those that are not clear, and which of them come in again because no other is left."""
    kept = set(map(id, clear))
    resting: list[tuple[BackendView, str]] = []
    failed: list[tuple[BackendView, str]] = []
    rejected: list[Rejected] = []
    for view in views:
        if id(view) in kept:
            continue
        word: str | None = Rejection.ALREADY_TRIED if view.spec.name in facts.tried else None
        for part in pipeline.filters:
            said = part(facts, view, fleet, now)
            if said is None:
                continue
            # Two soft words make a hard one: whoever failed this request by asking for silence is not asked again.
            if said not in SOFT or word is not None:
                rejected.append(Rejected(view.spec.name, said))
                break
            word = said
        else:
            # Its own failure on this request weighs more against a backend than its plea for silence.
            soft = failed if word == Rejection.ALREADY_TRIED else resting
            soft.append((view, str(word)))
    left_out: list[tuple[BackendView, str]] = []
    if clear:
        left_out = resting + failed
    elif resting:
        clear, left_out = [view for view, _ in resting], failed
    else:
        clear = [view for view, _ in failed]
    rejected += [Rejected(view.spec.name, word) for view, word in left_out]
    return clear, tuple(sorted(rejected, key=attrgetter("backend")))


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


def _priced_only(pipeline: Pipeline, facts: RequestFacts, views: Sequence[BackendView], now: float) -> list[Priced]:
    """The candidates with their prices and no estimate: predicting is dearer than all else, and most need none."""
    first, *others = pipeline.prices
    name, costs = first.name, first.of_all(facts, views, now)   # type: ignore[attr-defined]
    rest = [(part.name, part.of_all(facts, views, now)) for part in others]   # type: ignore[attr-defined]
    candidates = []
    for place, view in enumerate(views):
        share, health = view.spec.weight, view.health
        if health.state is not HEALTHY or health.held:
            share *= health.ramp(now)
        price = costs[place] / share if share > 0.0 else inf
        terms: tuple[tuple[str, float], ...] = ((name, price),)
        for other, more in rest:
            term = more[place] / share if share > 0.0 else inf
            price, terms = price + term, (*terms, (other, term))
        # Made as the tuple that it is: the named constructor takes longer than all above.
        candidates.append(new_tuple(Priced, (view, price if price == price else inf, terms, 0.0, None, None, 0.0)))
    return candidates


def _nobody(rejected: tuple[Rejected, ...]) -> str:
    if not rejected:
        return "no backend: the fleet is empty"
    counts = Counter([str(rejection.reason) for rejection in rejected])
    return ("no backend: " + ", ".join(f"{word} {count}" for word, count in sorted(counts.items())))[:MAX_REASON_CHARS]
