"""A simulated gateway's books and views mean what the real one's do: the same doings, side by side."""

from dataclasses import fields
from random import Random

import pytest

from backends.catalog.health import HealthRules
from backends.catalog.views import BackendView
from loadtest.sim.engine import SimEngine
from loadtest.sim.flight import Flight
from loadtest.sim.link import Link, share_loads
from loadtest.sim.pools import MODEL, find_pool
from loadtest.sim.workload import Physics, SimRequest
from policies.facts import RequestFacts
from router.fleet.leases import Lease
from router.fleet.live import Fleet

BACKEND = find_pool("site").backends[0]
SPEC = BACKEND.told(BACKEND.coefficients)


def a_link() -> Link:
    return Link(SPEC, SimEngine(BACKEND, Physics(), Random(1), 512), 0.0)


def a_flight(number: int, prompt: int) -> Flight:
    request = SimRequest(0.0, "chat", prompt, 100)
    return Flight(request, 0, RequestFacts(MODEL, prompt), number=number)


def sent(link: Link, flight: Flight) -> None:
    flight.lease = Lease(link.books, flight.facts.prompt_tokens)
    flight.lease.take()
    link.waiting[flight.number] = flight
    link.changed()


def load_of(view: BackendView) -> dict[str, int]:
    return {field.name: getattr(view, field.name) for field in fields(view)
            if field.name.startswith("in_flight") and field.name != "in_flight_at_sample"}


@pytest.mark.parametrize("seed", range(20))
def test_views_are_those_of_the_gateway(seed: int) -> None:
    """Requests come, get tokens in each round, pause, end: after every round both tell the same load."""
    rng = Random(seed)
    link, fleet = a_link(), Fleet()
    fleet.apply([SPEC], HealthRules(), "")
    live = fleet.backends[SPEC.name]
    real: dict[int, Lease] = {}
    flights: dict[int, Flight] = {}
    rounds = 0
    for number in range(60):
        chance = rng.random()
        if chance < 0.4 or not flights:
            flight = flights[number] = a_flight(number, rng.randrange(1, 3000))
            sent(link, flight)
            real[number] = live.lease(flight.facts.prompt_tokens)
            real[number].take()
        elif chance < 0.8:
            rounds += 1
            for other in link.emitting:
                real[other].generated(1)
            link.advance(rounds)
            for flight in list(link.waiting.values()):
                if rng.random() < 0.5:
                    link.starts(flight, float(number))
                    real[flight.number].generated(1)
        else:
            flight = flights.pop(rng.choice(list(flights)))
            link.ends(flight)
            real.pop(flight.number).settle()
        link.engine.rounds = rounds
        assert load_of(link.view(float(number), None)) == load_of(fleet.view().backends[0])
    fleet.close()


def test_a_paused_stream_keeps_its_tokens_and_gets_none() -> None:
    link = a_link()
    flight = a_flight(1, 50)
    sent(link, flight)
    link.advance(3)
    link.starts(flight, 1.0)
    link.advance(7)
    link.pauses(flight)
    link.advance(20)
    assert link.tokens_of(flight) == 5
    assert link.view(2.0, None).in_flight_context_tokens == 55
    link.resumes(flight)
    link.advance(22)
    assert link.tokens_of(flight) == 8
    assert link.ends(flight) == 8
    assert link.grown_tokens == 0
    assert link.books.cells.tolist() == [0, 0, 0, 0]


def test_an_unchanged_picture_is_the_same_object() -> None:
    link = a_link()
    first = link.view(1.0, None)
    assert link.view(2.0, None) is first
    sent(link, a_flight(1, 10))
    assert link.view(2.0, None) is not first
    belief = object()
    assert link.view(2.0, belief).belief is belief


def test_peers_books_are_added() -> None:
    link = a_link()
    sent(link, a_flight(1, 10))
    link.peers = (2, 300, 4, 5000)
    link.changed()
    view = link.view(1.0, None)
    assert (view.in_flight_requests, view.in_flight_prefill_tokens) == (7, 310)
    assert (view.in_flight_decode_requests, view.in_flight_context_tokens) == (4, 5000)


def test_gateways_tell_each_other_what_they_have_in_flight() -> None:
    links = [a_link(), a_link(), a_link()]
    for number, (link, prompt) in enumerate(zip(links, (100, 20, 3), strict=True)):
        sent(link, a_flight(number, prompt))
    links[0].starts(links[0].waiting[0], 1.0)
    share_loads(links, 1.0)
    assert [link.peers for link in links] == [(2, 23, 0, 0), (1, 3, 1, 101), (1, 20, 1, 101)]
    assert {link.view(1.0, None).in_flight_requests for link in links} == {3}
