"""The simulated world: it repeats itself, loses nothing, and obeys the arithmetic of queues where that is known."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from random import Random
from statistics import mean

import pytest

from backends.catalog.spec import Coefficients
from backends.catalog.views import BackendView
from loadtest.fake_engine.step import (
    EngineLimits,
    SequenceRequest,
    TokenEventKind,
    new_engine,
    next_step_s,
    step,
    step_ms,
    submit,
)
from loadtest.sim.flight import Fate
from loadtest.sim.pools import Pool, SimBackend, find_pool
from loadtest.sim.run import Job, lay_out, run_job, run_world
from loadtest.sim.workload import Physics, SimRequest, TrafficClass, Workload
from loadtest.sim.world import World
from loadtest.traffic import Lengths
from policies.facts import Budget, RequestFacts
from policies.learning import End, NoLearner, Sent
from policies.policy import Priced
from policies.registry import build_pipeline
from policies.spec import PolicySpec

QUIET = Physics(noise_sigma=0.0, hiccup_share=0.0, rtt_s=0.0, told_sigma=0.0)
ANY = TrafficClass("any", Budget(ttft_s=1.0, inter_token_s=0.05), Lengths(100, 0.5, 1000), Lengths(10, 0.5, 100))
CARD = Coefficients("one", "made up", 10.0, 0.1, 0.0, 10.0, 0.1, 1e-4, kv_capacity_tokens=100_000)


def one_card(slots: int) -> Pool:
    return Pool("one", (SimBackend("only", "only", "x", "fp8", CARD, slots, 2048, 1.0, 16),))


def world_of(pool: Pool, workload: Workload, policy: str = "round_robin") -> World:
    return World(pool, workload, [build_pipeline(PolicySpec(policy))], [NoLearner()], seed=1).run()


def poisson(rate_per_s: float, number: int, prompt: int, output: int) -> tuple[SimRequest, ...]:
    rng, at_s, requests = Random(7), 0.0, []
    for _ in range(number):
        at_s += rng.expovariate(rate_per_s)
        requests.append(SimRequest(at_s, "any", prompt, output))
    return tuple(requests)


def workload(requests: tuple[SimRequest, ...], physics: Physics = QUIET) -> Workload:
    return Workload(requests, {"any": ANY}, requests[-1].arrival_s + 1.0, physics=physics, warm_up_s=0.0)


def test_one_slot_is_a_queue_with_one_server() -> None:
    """Answers of one token on an engine of one slot: waits follow Lindley's recursion to the last digit."""
    service_s = step_ms(CARD, 300, 300 * 300 / 2, 0, 0) / 1000
    requests = poisson(0.8 / service_s, 3000, prompt=300, output=1)
    found = world_of(one_card(slots=1), workload(requests)).outcomes
    assert [outcome.request for outcome in found] == list(requests)
    waits = [outcome.end_s - outcome.request.arrival_s - service_s for outcome in found]
    expected = [0.0]
    for earlier, later in pairwise(requests):
        expected.append(max(0.0, expected[-1] + service_s - (later.arrival_s - earlier.arrival_s)))
    assert waits == pytest.approx(expected, abs=1e-9)
    # Pollaczek and Khinchine: the mean wait of M/D/1 at a load of 0.8 is twice the service time.
    assert mean(waits) == pytest.approx(2 * service_s, rel=0.25)


def test_a_lone_request_takes_what_its_iterations_take() -> None:
    (outcome,) = world_of(one_card(64), workload((SimRequest(1.0, "any", 3000, 5),))).outcomes
    chunks = step_ms(CARD, 2048, 0, 0, 0) + step_ms(CARD, 952, 0, 0, 0)
    assert outcome.first_token_at_s == pytest.approx(1.0 + chunks / 1000)
    decode = sum(step_ms(CARD, 0, 0, 1, 3001 + token) for token in range(4))
    assert outcome.end_s == pytest.approx(1.0 + (chunks + decode) / 1000)


def test_running_ahead_changes_nothing() -> None:
    """Against a loop that takes one iteration at a time and never looks ahead: equal to the last digit."""
    requests = poisson(12.0, 400, prompt=700, output=40)
    found = {outcome.request: outcome for outcome in world_of(one_card(16), workload(requests)).outcomes}
    state = new_engine(CARD, EngineLimits(100_000, 16, 2048, prefix_block_tokens=512))
    submitted, ended = 0, 0
    first: dict[object, float] = {}
    while ended < len(requests):
        start_s = next_step_s(state)
        if submitted < len(requests) and (start_s is None or requests[submitted].arrival_s <= start_s):
            at_s, _, prompt, output = requests[submitted][:4]
            submit(state, SequenceRequest(submitted, prompt, output, at_s))
            submitted += 1
            continue
        assert start_s is not None
        for event in step(state, start_s)[1].events:
            if event.kind is TokenEventKind.FIRST_TOKEN:
                first[event.id] = event.at_s
            elif event.kind is TokenEventKind.FINISHED:
                outcome = found[requests[int(str(event.id))]]
                assert (outcome.first_token_at_s, outcome.end_s) == (first[event.id], event.at_s)
                ended += 1


class Recorder(NoLearner):
    """Writes down what it is told."""

    name = "recorder"

    def __init__(self) -> None:
        self.told: list[list[tuple[str, float, int]]] = []
        self.believed: list[str] = []

    def sent(self, facts: RequestFacts, priced: Priced, now: float) -> Sent:
        made = super().sent(facts, priced, now)
        made.notes = [("sent", now, facts.prompt_tokens)]
        self.told.append(made.notes)
        return made

    def first_token(self, sent: Sent, now: float) -> None:
        sent.notes.append(("first", now, 1))

    def paced(self, sent: Sent, view: BackendView, gap_s: float, tokens: int, now: float) -> None:
        assert gap_s > 0
        assert view.spec.name == sent.backend
        assert view.in_flight_decode_requests > 0
        sent.notes.append(("paced", now, tokens))

    def ended(self, sent: Sent, end: End, now: float) -> None:
        sent.notes.append(("ended", now, end.output_tokens))

    def belief(self, backend: str, now: float) -> None:
        self.believed.append(backend)


def test_a_learner_is_told_of_every_attempt_in_order() -> None:
    job = Job("burst", "site", "round_robin", 1, 4.0, 60.0)
    recorder = Recorder()
    plan = lay_out(job)
    World(find_pool("site"), plan, [build_pipeline(PolicySpec("round_robin"))], [recorder], 1).run()
    assert len(recorder.told) == len(plan.requests)
    outputs = Counter(request.output_tokens for request in plan.requests)
    reports = 0
    for told in recorder.told:
        what = [kind for kind, _, _ in told]
        assert what[:2] == ["sent", "first"]
        assert what[-1] == "ended"
        assert set(what[2:-1]) <= {"paced"}
        times = [at_s for _, at_s, _ in told]
        assert times == sorted(times)
        tokens = told[-1][2]
        assert 1 + sum(count for kind, _, count in told if kind == "paced") <= tokens
        outputs[tokens] -= 1
        reports += len(told) - 3
    assert not any(outputs.values()), "the tokens that are counted are those that were generated"
    assert 0 < reports <= 4 * 10 * (60.0 + 60.0)
    assert set(recorder.believed) == {backend.name for backend in find_pool("site").backends}


def test_the_network_is_on_the_way_twice() -> None:
    request = (SimRequest(1.0, "any", 100, 3),)
    near, = world_of(one_card(64), workload(request)).outcomes
    far, = world_of(one_card(64), workload(request, replace(QUIET, rtt_s=0.04))).outcomes
    assert near.first_token_at_s is not None
    assert far.first_token_at_s == pytest.approx(near.first_token_at_s + 0.04)
    assert far.end_s == pytest.approx(near.end_s + 0.04)


@pytest.mark.parametrize("scenario", ["burst", "dies", "several-gateways", "prefix-heavy", "card-lent", "misspecified"])
@pytest.mark.parametrize("policy", ["headrace", "p2c"])
def test_every_request_ends_once_and_the_books_return_to_zero(scenario: str, policy: str) -> None:
    job = Job(scenario, "site", policy, 3, 5.0, 80.0)
    world = run_world(job)
    planned = lay_out(job).requests
    assert Counter(outcome.request for outcome in world.outcomes) == Counter(planned)
    for gateway in world.gateways:
        for link in gateway.links:
            assert link.books.cells.tolist() == [0, 0, 0, 0]
            assert link.grown_tokens == 0
            assert [link.waiting, link.emitting, link.paused] == [{}, {}, {}]
    for engine in world.engines:
        assert engine.state.running_seqs == engine.state.waiting_seqs == 0
        assert engine.state.kv_used_tokens == 0
        assert engine.cached_tokens == {}


def test_a_tight_memory_preempts_and_still_loses_nothing() -> None:
    small = replace(CARD, kv_capacity_tokens=4000)
    pool = Pool("tight", (SimBackend("only", "only", "x", "fp8", small, 64, 2048, 1.0, 16),))
    world = world_of(pool, workload(poisson(5.0, 200, prompt=300, output=150)))
    assert world.engines[0].state.preemptions > 0
    assert all(outcome.fate is Fate.SERVED for outcome in world.outcomes)
    (link,) = world.gateways[0].links
    assert link.books.cells.tolist() == [0, 0, 0, 0]
    assert link.grown_tokens == 0


@pytest.mark.parametrize("scenario", ["burst", "dies", "several-gateways", "mooncake", "diurnal"])
def test_the_same_seed_gives_the_same_run(scenario: str) -> None:
    runs = [run_world(Job(scenario, "site", "headrace", 2, 3.0, 60.0)).outcomes for _ in range(2)]
    assert runs[0] == runs[1]
    assert run_world(Job(scenario, "site", "headrace", 4, 3.0, 60.0)).outcomes != runs[0]


def test_policies_meet_the_same_requests() -> None:
    seen = [{outcome.request for outcome in run_world(Job("burst", "site", policy, 1, 4.0, 60.0)).outcomes}
            for policy in ("round_robin", "headrace")]
    assert seen[0] == seen[1]


def test_more_load_is_later() -> None:
    runs = [run_job(Job("steady", "site", "least_inflight", 1, rate, 120.0)) for rate in (2.0, 6.0, 14.0)]
    assert runs[0].in_budget > runs[1].in_budget > runs[2].in_budget
    p99s = [run.ttft_p99_s for run in runs]
    assert all(low is not None and high is not None and low < high for low, high in pairwise(p99s))
    assert max(runs[0].busy.values()) < 1.0


def test_a_backend_alone_is_dearer_when_it_is_the_dear_one() -> None:
    """Accounted cost is the pool's own formula: the sum over what was served, nothing for the load of the moment."""
    world = run_world(Job("steady", "site", "round_robin", 1, 3.0, 60.0))
    backends = find_pool("site").backends
    for outcome in world.outcomes:
        assert outcome.backend is not None
        request = outcome.request
        expected = backends[outcome.backend].cost(request.prompt_tokens, 0, request.output_tokens)
        assert outcome.cost == pytest.approx(expected)


def test_sixty_backends_share_the_work() -> None:
    run = run_job(Job("burst", "site:60", "round_robin", 1, 60.0, 34.0))
    assert len(run.shares) == 60
    assert max(run.shares.values()) < 0.04


def test_P42_counts_that_outlive_long_requests_keep_four_twins_level_for_forty_minutes() -> None:
    """Requests of some 80 s, longer than a counter lives elsewhere; here nothing expires and nothing goes negative."""
    slow = replace(CARD, decode_base_ms=200.0, kv_capacity_tokens=1_000_000)
    twins = Pool("twins", tuple(
        SimBackend(f"b{number}", "only", "x", "fp8", slow, 256, 2048, 1.0, 16) for number in range(4)
    ))  # fmt: skip
    requests = poisson(2.0, 4800, prompt=200, output=400)
    assert requests[-1].arrival_s > 2200
    found = world_of(twins, workload(requests), "least_inflight").outcomes
    assert all(outcome.fate is Fate.SERVED for outcome in found)
    assert mean(outcome.end_s - outcome.request.arrival_s for outcome in found) > 60
    served = Counter(outcome.backend for outcome in found)
    shares = [100 * served[number] / len(found) for number in range(4)]
    print(f"shares {shares}")
    assert max(shares) - min(shares) < 5
