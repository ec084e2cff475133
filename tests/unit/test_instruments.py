"""Our counters and histograms export what prometheus_client's would."""

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import Counter as PlainCounter
from prometheus_client import Histogram as PlainHistogram

from router.record.instruments import Counter, Histogram

BOUNDS = (0.01, 0.1, 1.0)
values = st.floats(0, 10) | st.sampled_from(BOUNDS)
labels = st.sampled_from(["a", 'quo"te', "new\nline"])


def page(registry: CollectorRegistry) -> list[str]:
    """Samples of a registry, without the creation times that prometheus_client adds."""
    lines = generate_latest(registry).decode().splitlines()
    return sorted(line for line in lines if "_created" not in line)


@given(st.lists(st.tuples(labels, values)))
def test_histogram_exports_what_prometheus_client_exports(observations: list[tuple[str, float]]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    fast = Histogram("h", "doc", ("who",), BOUNDS, ours)
    plain = PlainHistogram("h", "doc", ("who",), buckets=BOUNDS, registry=theirs)
    for who, value in observations:
        fast.observe((who,), value)
        plain.labels(who).observe(value)
    assert page(ours) == page(theirs)


@given(st.lists(st.tuples(labels, values)))
def test_counter_exports_what_prometheus_client_exports(increments: list[tuple[str, float]]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    fast = Counter("c", "doc", ("who",), ours)
    plain = PlainCounter("c", "doc", ("who",), registry=theirs)
    for who, amount in increments:
        fast.inc((who,), amount)
        plain.labels(who).inc(amount)
    assert page(ours) == page(theirs)


def test_without_labels_there_is_one_series() -> None:
    registry = CollectorRegistry()
    counter = Counter("c", "doc", (), registry)
    counter.inc(())
    counter.inc((), 2)
    assert counter.value(()) == 3
    assert "c_total 3.0" in page(registry)
