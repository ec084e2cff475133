"""A sample of a large fleet: some of each kind of backend, by dice.

Within a kind (card type and count, quantization, parallel layout, price) a request costs the same everywhere, so that
looking at a few loses little (power of d choices, here with d in the tens); between kinds it does not, so none may be
missed. Each kind of `m` backends gives `max(4, d·m/n)` of them, evenly spaced from an offset that is thrown, and the
backend that the session was on comes along.

What depends on the specs alone is kept with the pipeline and made anew when a spec is another one.
"""

from typing import NamedTuple

from backends.catalog.spec import BackendSpec
from backends.catalog.views import BackendView, FleetView
from policies.beliefs.pool import PoolBelief
from policies.facts import RequestFacts
from policies.policy import Pipeline, Rng

FEWEST_OF_A_KIND = 4


class _Roster(NamedTuple):
    """Places in the fleet, by name within each kind, kinds by model."""

    specs: list[BackendSpec]
    kinds: dict[str, list[list[int]]]
    places: dict[str, int]


def sampled(pipeline: Pipeline, facts: RequestFacts, fleet: FleetView, rng: Rng) -> list[BackendView]:
    """About `pipeline.sample` backends that serve the request's model; all of them where they are no more."""
    views, wanted = fleet.backends, pipeline.sample or len(fleet.backends)
    roster = _roster(pipeline, [view.spec for view in views])
    kinds = roster.kinds.get(facts.model, [])
    count = sum([len(places) for places in kinds])
    if count <= wanted:
        return [views[place] for places in kinds for place in places]
    chosen: list[int] = []
    fewest = min(FEWEST_OF_A_KIND, max(1, wanted // len(kinds)))
    for places in kinds:
        size = len(places)
        take = min(size, max(fewest, round(wanted * size / count)))
        if take == size:
            chosen += places
            continue
        stride = size // take
        start = rng.randrange(size)
        # Round the end and on: each has the same chance.
        chosen += [places[(start + step * stride) % size] for step in range(take)]
    last = fleet.belief.sessions.get(facts.session_key) if (
        facts.session_key is not None and type(fleet.belief) is PoolBelief) else None
    place = None if last is None else roster.places.get(last)
    if place is not None and place not in chosen:
        chosen.append(place)
    return [views[place] for place in chosen]


def _roster(pipeline: Pipeline, specs: list[BackendSpec]) -> _Roster:
    known: _Roster | None = pipeline.memo.get("roster")
    # Lists are equal at once where they hold the same objects.
    if known is not None and known.specs == specs:
        return known
    kinds: dict[str, dict[tuple[object, ...], list[int]]] = {}
    for place, spec in sorted(enumerate(specs), key=lambda entry: entry[1].name):
        kind = (spec.card_type, spec.card_count, spec.quantization, spec.parallel, spec.price_per_hour)
        kinds.setdefault(spec.model, {}).setdefault(kind, []).append(place)
    made = pipeline.memo["roster"] = _Roster(
        specs, {model: [table[kind] for kind in sorted(table, key=repr)] for model, table in kinds.items()},
        {spec.name: place for place, spec in enumerate(specs)})
    return made
