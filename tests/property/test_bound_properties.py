"""The bound is one: no assignment that the engine was really run with beats it, whatever the engines and requests.

Engines are replayed by the fake engine's own iterations, with chunks, attention pairs, memory short enough to preempt,
deaths and slow starts. Budgets are drawn about what the requests take, so that some are kept and some are not.
"""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.catalog.spec import Coefficients
from loadtest.fake_engine.step import EngineLimits
from loadtest.sim.bound.certificate import least_cost, most_good
from loadtest.sim.bound.clairvoyant import Clairvoyant
from loadtest.sim.bound.instance import BoundBackend, BoundRequest, SpeedSpan, accounted_cost, device_s
from loadtest.sim.bound.replay import STILL, StepDice, replay
from loadtest.sim.bound.slots import slot_table
from loadtest.sim.bound.work import StepNoise, work_table

SLOT_S = 0.5

coefficients = st.builds(
    Coefficients,
    version=st.just("drawn"), source=st.just("drawn"),
    prefill_base_ms=st.floats(0.1, 30), prefill_ms_per_token=st.floats(0.0, 0.3, allow_subnormal=False),
    prefill_ms_per_pair=st.sampled_from([0.0, 1e-5, 1e-3]), decode_base_ms=st.floats(0.1, 30),
    decode_ms_per_seq=st.floats(0.0, 2.0, allow_subnormal=False),
    decode_ms_per_seq_token=st.sampled_from([0.0, 1e-4, 1e-2]),
    host_ms=st.floats(0, 5), first_token_overhead_ms=st.floats(0, 50),
)
spans = st.sampled_from([
    (), (SpeedSpan(0.0, 1.5, 0.4),), (SpeedSpan(0.5, 2.0, 0.0),), (SpeedSpan(0.0, 1.0, 0.5), SpeedSpan(2.0, 3.0, 0.0)),
])
closings = st.sampled_from([(), ((0.7, 1.6),)])


@st.composite
def backends(draw: st.DrawFn) -> BoundBackend:
    seqs = draw(st.integers(1, 6))
    chunk = draw(st.integers(max(8, seqs), 120))
    limits = EngineLimits(draw(st.integers(80, 400)), seqs, chunk, draw(st.booleans()))
    return BoundBackend("drawn", draw(coefficients), limits, draw(st.floats(0.1, 5.0)), draw(st.integers(1, 8)),
                        draw(spans), closed=draw(closings))


@st.composite
def requests(draw: st.DrawFn) -> list[BoundRequest]:
    def one(at_s: float) -> BoundRequest:
        prompt = draw(st.integers(1, 120))
        return BoundRequest(at_s, prompt, prompt, draw(st.integers(1, 40)), draw(st.floats(0.01, 1.5)),
                            draw(st.floats(0.0, 0.08)), draw(st.sampled_from(["a", "b"])))
    gaps = draw(st.lists(st.sampled_from([0.0, 0.01, 0.1, 0.5]), min_size=1, max_size=14))
    return [one(at_s) for at_s in np.cumsum(gaps).tolist()]


def replayed(
    drawn: list[BoundRequest], pool: list[BoundBackend], assignment: list[int], dice: StepDice = STILL
) -> tuple[int, float, float]:
    """Requests in budget, what they cost, and what all together did."""
    good = [replay(backend, [(i, request) for i, request in enumerate(drawn) if assignment[i] == at], dice)
            for at, backend in enumerate(pool)]
    kept = sum(accounted_cost(backend, drawn[i]) for backend, mine in zip(pool, good, strict=True) for i in mine)
    whole = sum(accounted_cost(pool[at], request) for request, at in zip(drawn, assignment, strict=True) if at >= 0)
    return sum(map(len, good)), kept, whole


def named(pool: list[BoundBackend]) -> list[BoundBackend]:
    return [BoundBackend(f"b{at}", b.coefficients, b.limits, b.price_per_hour, b.reference_batch, b.spans,
                         closed=b.closed) for at, b in enumerate(pool)]


pools = st.lists(backends(), min_size=1, max_size=3).map(named)


@settings(max_examples=100, deadline=None)
@given(requests(), pools, st.data())
def test_no_replayed_assignment_beats_the_bound(
    drawn: list[BoundRequest], pool: list[BoundBackend], data: st.DataObject
) -> None:
    assignment = [data.draw(st.integers(-1, len(pool) - 1)) for _ in drawn]
    good, kept, whole = replayed(drawn, pool, assignment)
    bounds = Clairvoyant(drawn, pool, slot_s=SLOT_S)
    assert good <= bounds.most_good() + 1e-9
    assert bounds.least_cost(good) <= kept * (1 + 1e-9)
    assert kept <= whole * (1 + 1e-9)


@settings(max_examples=40, deadline=None)
@given(requests(), backends())
def test_not_even_what_one_backend_did_alone(drawn: list[BoundRequest], backend: BoundBackend) -> None:
    """Each request that came in budget is a pair, and the backend had the time for its work."""
    good = replay(backend, list(enumerate(drawn)))
    table = work_table(drawn, [backend])
    assert all(table.can_serve[i, 0] for i in good)
    slots = slot_table(table, [backend], SLOT_S)
    done_s = sum(table.prefill_s[i, 0] + table.decode_s[i, 0] for i in good)
    assert done_s <= slots.capacity_s.sum() + 1e-9


@settings(max_examples=40, deadline=None)
@given(requests(), pools, st.integers(0, 2**32 - 1), st.floats(0, 1))
def test_any_prices_prove_less_than_the_best(
    drawn: list[BoundRequest], pool: list[BoundBackend], seed: int, scale: float
) -> None:
    bounds = Clairvoyant(drawn, pool, slot_s=SLOT_S)
    slots = bounds.slots
    prices = np.random.default_rng(seed).random(slots.capacity_s.shape) * scale
    goal = bounds.most_good()
    assert most_good(slots, prices) >= goal * (1 - 2e-3) - 1e-6
    costs = prices * 1e-4
    for share in (0.3, 0.9):
        assert least_cost(slots, costs, share * goal) <= bounds.least_cost(share * goal) * (1 + 1e-5) + 1e-12


@settings(max_examples=40, deadline=None)
@given(requests(), pools, st.integers(0, 99))
def test_noise_is_granted(drawn: list[BoundRequest], pool: list[BoundBackend], seed: int) -> None:
    """Steps that happen to be short do not carry an assignment below the bound. (Sums over few steps spread more than
    a trace's do: the allowance for single requests is what is tried here.)"""
    dice = StepDice(sigma=0.06, seed=seed)
    good, kept, _ = replayed(drawn, pool, [i % len(pool) for i in range(len(drawn))], dice)
    bounds = Clairvoyant(drawn, pool, slot_s=1000.0, noise=StepNoise(0.06))
    assert good <= bounds.most_good() + 1e-9
    assert bounds.least_cost(good) <= kept * (1 + 1e-9)


@given(backends(), st.integers(1, 5000), st.integers(1, 500), st.data())
def test_prefix_hits_never_cost(backend: BoundBackend, prompt: int, output: int, data: st.DataObject) -> None:
    fewer, more = sorted(data.draw(st.lists(st.integers(1, prompt), min_size=2, max_size=2)))
    assert device_s(backend, prompt, fewer, output) <= device_s(backend, prompt, more, output) * (1 + 1e-12)


def test_the_drawn_instances_keep_some_budgets_and_miss_some() -> None:
    """The properties above would say nothing if nobody were ever in budget, or everybody."""
    shares = []

    @settings(max_examples=100, deadline=None, database=None, derandomize=True)
    @given(requests(), pools)
    def count(drawn: list[BoundRequest], pool: list[BoundBackend]) -> None:
        good, _, _ = replayed(drawn, pool, [i % len(pool) for i in range(len(drawn))])
        shares.append(good / len(drawn))

    count()
    assert sum(0 < share < 1 for share in shares) >= 20, shares
