"""One metrics page of several workers."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from router.workers.merged_admin import merge_fleets
from router.workers.merged_metrics import Page, Retired, page_of


def page(requests: float, in_flight: float, ok: float = 1, drift: float = 1.0, seconds: tuple[float, ...] = ()) -> Page:
    registry = CollectorRegistry()
    counter = Counter("headrace_requests", "Requests.", ("backend",), registry=registry)
    counter.labels("a").inc(requests)
    gauge = Gauge("headrace_backend_in_flight_requests", "In flight.", ("backend",), registry=registry)
    gauge.labels("a").set(in_flight)
    Gauge("headrace_config_last_reload_successful", "Ok.", registry=registry).set(ok)
    Gauge("headrace_backend_drift_ratio", "Drift.", ("backend",), registry=registry).labels("a").set(drift)
    histogram = Histogram("headrace_seconds", "Time.", buckets=(1, 2), registry=registry)
    for value in seconds:
        histogram.observe(value)
    return Page(generate_latest(registry).decode())


def values(text: bytes) -> dict[str, float]:
    return {
        sample.name + "".join(f"{{{name}={value}}}" for name, value in sample.labels.items()): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def test_counted_is_summed_seen_is_the_leaders_and_good_is_good_everywhere() -> None:
    pages = {0: page(3, 1, 0, 1.5, (0.5,)), 1: page(4, 2, 1, 9.0, (1.5, 5.0))}
    found = values(page_of(Retired().merge(pages, leader=0)))
    assert found["headrace_requests_total{backend=a}"] == 7
    assert found["headrace_backend_in_flight_requests{backend=a}"] == 3
    assert found["headrace_backend_drift_ratio{backend=a}"] == 1.5
    assert found["headrace_config_last_reload_successful"] == 0
    assert found["headrace_seconds_bucket{le=1.0}"] == 1
    assert found["headrace_seconds_bucket{le=+Inf}"] == 3
    assert found["headrace_seconds_sum"] == 7.0


def test_what_ended_workers_counted_stays_and_what_they_held_goes() -> None:
    retired = Retired()
    retired.add(page(10, 5, seconds=(0.1,)))
    retired.add(page(1, 5))
    found = values(page_of(retired.merge({4: page(2, 1)}, leader=4)))
    assert found["headrace_requests_total{backend=a}"] == 13
    assert found["headrace_backend_in_flight_requests{backend=a}"] == 1
    assert found["headrace_seconds_count"] == 1
    alone = values(page_of(retired.merge({}, leader=None)))
    assert alone["headrace_requests_total{backend=a}"] == 11
    assert "headrace_backend_in_flight_requests{backend=a}" not in alone


def document(in_flight: int, requests: int, ready: bool = True) -> dict[str, object]:
    entry = {
        "name": "a", "url": "http://a", "in_flight": {"requests": requests, "prefill_tokens": 1, "context_tokens": 2},
        "served_requests": 5, "failed_requests": 1, "health": requests,
    }  # fmt: skip
    return {"in_flight": in_flight, "ready": ready, "backends": [entry], "retiring": []}


def test_fleet_documents_add_up() -> None:
    merged = merge_fleets([document(2, 2), document(3, 1, ready=False)])
    assert merged["in_flight"] == 5
    assert merged["ready"] is True
    (entry,) = merged["backends"]
    assert entry["in_flight"] == {"requests": 3, "prefill_tokens": 2, "context_tokens": 4}
    assert entry["served_requests"] == 10
    assert entry["health"] == 2, "the leader's"


def test_a_restart_is_owed_where_any_worker_owes_it() -> None:
    owing = {**document(0, 0), "needs_restart": ["listen.port"]}
    merged = merge_fleets([{**document(0, 0), "needs_restart": []}, owing, document(0, 0)])
    assert merged["needs_restart"] == ["listen.port"]
