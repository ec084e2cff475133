"""Beliefs for the tests of routing decisions: made by hand, or drawn."""

from dataclasses import replace

from hypothesis import strategies as st

from backends.catalog.views import BackendView, FleetView
from policies.beliefs.backend import BackendBelief, Streams
from policies.beliefs.pool import PoolBelief
from policies.facts import Budget, RequestFacts
from tests.policy_fleet import NOW_S

CHAT = RequestFacts("m", 400, stream=True, latency_class="chat", budget=Budget(ttft_s=1.0, inter_token_s=0.06))
CODE = RequestFacts("m", 1400, stream=True, latency_class="code", budget=Budget(ttft_s=0.4, inter_token_s=0.035),
                    expected_output_tokens=30)


def a_pool(mean_price: float = 1e-4) -> PoolBelief:
    pool = PoolBelief()
    pool.mean_price["m"] = mean_price
    for facts in (CHAT, CODE):
        pool.made_class_of(facts).lengths.expected_output_tokens = float(facts.expected_output_tokens)
    return pool


def believing(view: BackendView, pool: PoolBelief) -> BackendView:
    """The view with a belief of its own, as it is before anything was learned."""
    return replace(view, belief=BackendBelief(pool.tails))


def fleet_of(*views: BackendView, pool: PoolBelief) -> FleetView:
    return FleetView(views, config_hash="c0ffee", belief=pool)


def streaming(view: BackendView, pool: PoolBelief, facts: RequestFacts, count: int, slack_s: float = 0.0) -> None:
    """`count` streams of the request's class decode there."""
    streams = view.belief.streams.setdefault(pool.made_class_of(facts), Streams())
    streams.count += count
    streams.slack_s += slack_s
    view.belief.open_requests += count
    view.belief.version += 1


residuals = st.lists(st.floats(-6.0, 20.0), max_size=60)


@st.composite
def beliefs(draw: st.DrawFn, pool: PoolBelief) -> BackendBelief:
    """A belief that traffic could have left."""
    belief = BackendBelief(pool.tails)
    for tail in (belief.ttft, belief.pace, belief.end):
        for z in draw(residuals):
            tail.observe(z)
    belief.drift.set(draw(st.floats(-2.0, 2.0)))
    belief.prefill.set(draw(st.floats(-1.0, 1.0)))
    belief.decode.set(draw(st.floats(-1.0, 1.0)))
    for tokens in draw(st.lists(st.integers(0, 9000), max_size=3)):
        belief.waiting.sent(tokens, NOW_S - draw(st.floats(0.0, 5.0)))
    for work_s in draw(st.lists(st.floats(0.0, 3.0), max_size=4)):
        belief.arrivals.add(work_s, NOW_S - draw(st.floats(0.0, 20.0)))
    belief.cached_ahead_tokens = draw(st.integers(0, 3000))
    belief.open_requests = draw(st.integers(0, 5))
    belief.heard_at_s = draw(st.none() | st.floats(NOW_S - 30.0, NOW_S))
    for kind in pool.classes.values():
        streams = belief.streams.setdefault(kind, Streams())
        streams.count, streams.slack_s = draw(st.integers(0, 50)), draw(st.floats(0.0, 20.0))
    return belief


@st.composite
def believed_fleets(draw: st.DrawFn, views: st.SearchStrategy[list[BackendView]]) -> FleetView:
    """A fleet with a learner's beliefs on it."""
    pool = a_pool(draw(st.floats(1e-6, 1e-2)))
    for kind in pool.classes.values():
        kind.weight = draw(st.floats(0.5, 5.0))
    drawn = [replace(view, belief=draw(beliefs(pool))) for view in draw(views)]
    return fleet_of(*drawn, pool=pool)
