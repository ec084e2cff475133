"""The fleet file edited under a running load: nothing is lost, shares move, and a broken file changes nothing."""

import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from math import sqrt
from pathlib import Path
from typing import Any

import pytest

from loadtest.run import LoadOptions, planned_requests
from loadtest.run import load as run_locust
from loadtest.traffic import Lengths
from tests.gateway_stack import MODEL
from tests.processes import (
    FakeEngine,
    GatewayProcess,
    OpenLoad,
    RawStream,
    Shape,
    ask,
    failures,
    fake_engines,
    gateway_process,
    served_by,
    until,
)

pytestmark = pytest.mark.load

NAMES = ("b0", "b1", "b2")
RATE_PER_S = 40.0
SHAPE = Shape(max_tokens=20)
SAMPLE = 60
"""Requests that a share is read from: 1.5 s of the load."""
LOCUST = LoadOptions(users=4, rate_per_s=25.0, duration_s=6.0, drain_s=10.0,
                     prompts=Lengths(100, 0.5, 400), outputs=Lengths(20, 0.3, 40))
LONG_TOKENS = 250
"""About 2.5 s on the card that is played."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reload")


@pytest.fixture(scope="module")
def engines(folder: Path) -> Iterator[list[FakeEngine]]:
    with fake_engines(folder, (*NAMES, "spare")) as engines:
        yield engines


@pytest.fixture
def gateway(engines: list[FakeEngine], tmp_path: Path) -> Iterator[GatewayProcess]:
    with gateway_process(tmp_path, [engine.backend for engine in engines[:3]]) as process:
        yield process


def sighup(gateway: GatewayProcess) -> None:
    gateway.send_signal(signal.SIGHUP)


def asked(gateway: GatewayProcess) -> None:
    status, answer = ask(gateway.admin_url, "/admin/reload", method="POST")
    assert status == 200, answer


def check_share_moved(before: Counter[str], after: Counter[str]) -> None:
    """b0's share was a third and is three quarters, within three standard errors of what dice would give."""
    was, now = before["b0"] / before.total(), after["b0"] / after.total()
    error = sqrt(was * (1 - was) / before.total() + now * (1 - now) / after.total())
    print(f"share of b0 {was:.2f} of {before.total()} → {now:.2f} of {after.total()}, standard error {error:.2f}")
    assert now - was > 3 * error
    assert abs(was - 1 / 3) < 3 * error
    assert abs(now - 6 / 8) < 3 * error


@pytest.mark.parametrize(("pull", "trigger"), [(sighup, "sighup"), (asked, "admin")])
def test_shares_follow_the_weights_and_no_request_is_lost(
    gateway: GatewayProcess, pull: Callable[[GatewayProcess], None], trigger: str
) -> None:
    with OpenLoad(gateway.url, RATE_PER_S, SHAPE) as load:
        began_s = time.monotonic()
        load.await_served(SAMPLE, since_s=began_s)
        before = served_by(load.since(began_s))
        gateway.set_weights(b0=6, b1=1, b2=1)
        pull(gateway)
        gateway.await_weights(b0=6, b1=1, b2=1)
        until(lambda: gateway.config()["last_result"]["trigger"] == trigger, f"the reload to be put down to {trigger}")
        moved_s = time.monotonic()
        load.await_served(SAMPLE, since_s=moved_s)
        after = served_by(load.since(moved_s))
    assert len(load.records) == load.started
    assert not failures(load.records)
    check_share_moved(before, after)
    gateway.await_empty_books()


def test_weights_tuned_in_the_file_under_a_locust_load_lose_no_request(gateway: GatewayProcess, tmp_path: Path) -> None:
    """The watch on the file alone takes the edit over."""
    with ThreadPoolExecutor(1) as background:
        load = background.submit(run_locust, LOCUST, gateway.url, MODEL, tmp_path, exact_tokens=True, classes={})
        until(lambda: gateway.metric("headrace_requests_total") >= SAMPLE, "locust to be at work", every_s=0.05)
        edited_s = time.monotonic()
        gateway.set_weights(b0=6, b1=1, b2=1)
        gateway.await_weights(b0=6, b1=1, b2=1)
        moved_s = time.monotonic()
        assert gateway.config()["last_result"]["trigger"] in ("file", "poll")
        records = load.result(timeout=60)
    assert len(records) == planned_requests(LOCUST, {}), "every request of the schedule came back"
    assert not failures(records)
    print(f"{len(records)} requests by locust, 0 lost, in force {moved_s - edited_s:.2f} s after the edit")
    # Clocks agree: monotonic time is the machine's, not the process's.
    check_share_moved(served_by([record for record in records if record.intended_at_s < edited_s]),
                      served_by([record for record in records if record.intended_at_s > moved_s]))
    gateway.await_empty_books()


def test_the_priced_policy_too_follows_weights_under_load(engines: list[FakeEngine], tmp_path: Path) -> None:
    """Equal cards at equal prices: who weighs more is chosen, with the `headrace` preset."""
    with (
        gateway_process(tmp_path, [{**engine.backend, "price_per_hour": 1.0} for engine in engines[:3]],
                        policy={"name": "headrace"}) as gateway,
        OpenLoad(gateway.url, RATE_PER_S, SHAPE) as load,
    ):
        shares = {}
        for favourite in ("b0", "b2"):
            weights = {name: 4.0 if name == favourite else 1.0 for name in NAMES}
            gateway.set_weights(**weights)
            gateway.await_weights(**weights)
            since_s = time.monotonic()
            load.await_served(40, since_s=since_s)
            served = served_by(load.since(since_s))
            shares[favourite] = {name: round(served[name] / served.total(), 2) for name in NAMES}
    print(shares)
    assert not failures(load.records)
    for favourite, share in shares.items():
        assert share[favourite] == max(share.values())
        assert share[favourite] > 0.5


def drain_by_weight(gateway: GatewayProcess, name: str, drained: bool) -> None:
    gateway.set_weights(**{name: 0 if drained else 1})


def drain_by_hand(gateway: GatewayProcess, name: str, drained: bool) -> None:
    status, _ = ask(gateway.admin_url, f"/admin/backends/{name}/{'drain' if drained else 'undrain'}", method="POST")
    assert status == 200


@pytest.mark.parametrize("drain", [drain_by_weight, drain_by_hand])
def test_p47_a_drained_backend_finishes_its_streams_and_gets_no_request(
    gateway: GatewayProcess, drain: Callable[[GatewayProcess, str, bool], None]
) -> None:
    with OpenLoad(gateway.url, RATE_PER_S, SHAPE) as load:
        streams = [RawStream(gateway.url, max_tokens=LONG_TOKENS).send() for _ in range(6)]
        victim = streams[0].backend
        drain(gateway, victim, True)
        until(lambda: gateway.backend(victim)["draining"], "the drain to be in force")
        drained_s = time.monotonic()
        assert gateway.in_flight(victim) >= 1
        load.await_served(SAMPLE, since_s=drained_s)
        for stream in streams:
            with stream:
                stream.read_to_end()
                assert stream.ended_well
        until(lambda: gateway.in_flight(victim) == 0, "the drained backend to be empty")
        drain(gateway, victim, False)
        until(lambda: not gateway.backend(victim)["draining"], "the drain to be over")
        back_s = time.monotonic()
        load.await_served(SAMPLE, since_s=back_s)
    assert not failures(load.records)
    # A request that was due before the swap may have been decided before it too.
    assert served_by(load.since(drained_s, back_s - 0.5))[victim] == 0
    assert served_by(load.since(back_s))[victim] > 0.2 * SAMPLE
    gateway.await_empty_books()


def test_a_broken_file_changes_nothing_and_is_seen_and_the_repaired_one_is_taken(gateway: GatewayProcess) -> None:
    running = gateway.config()["config_hash"]
    good = gateway.fleet_file.read_text()
    broken = {  # by a word that the report of each must have
        "not valid YAML": good[: good.index('"models"')],
        "is empty": "",
        "weigth": good.replace('"slots"', '"weigth": 3, "slots"', 1),
        "listen.port": good.replace(f'"port": {gateway.port}', '"port": "high"'),
    }
    with OpenLoad(gateway.url, RATE_PER_S, SHAPE) as load:
        load.await_served(20)
        for word, text in broken.items():
            gateway.write(text)
            config = until(lambda word=word: _refused(gateway, word), f"a report of {word}")  # type: ignore[misc]
            assert config["config_hash"] == running
            assert config["is_stale"]
            assert all(problem["message"] and problem["line"] for problem in config["last_error"]["problems"])
            assert gateway.metric("headrace_config_last_reload_successful") == 0
        status, answer = ask(gateway.admin_url, "/admin/reload", method="POST")
        assert status == 422, answer
        broken_s = time.monotonic()
        load.await_served(SAMPLE, since_s=broken_s)
        meanwhile = served_by(load.since(broken_s))
        gateway.set_weights(b0=5)
        gateway.await_weights(b0=5)
        repaired_s = time.monotonic()
        assert gateway.metric("headrace_config_last_reload_successful") == 1
        assert gateway.config()["config_hash"] != running
        assert not gateway.config()["is_stale"]
        load.await_served(20, since_s=repaired_s)
    assert not failures(load.records)
    assert set(meanwhile) == set(NAMES), "the last good fleet served on"


def _refused(gateway: GatewayProcess, word: str) -> dict[str, Any]:
    """What the gateway says of its configuration once it has refused a file for something with this word."""
    config = gateway.config()
    problems = (config["last_error"] or {}).get("problems", ())
    return config if any(word in _text(problem) for problem in problems) else {}


def _text(problem: Mapping[str, Any]) -> str:
    return f"line {problem['line']}: {problem['path']}: {problem['message']}"


def test_p46_an_unrelated_edit_keeps_counts_health_and_connections(gateway: GatewayProcess) -> None:
    streams = [RawStream(gateway.url, max_tokens=20_000).send() for _ in range(9)]
    for stream in streams:
        stream.read_until(b" t5")
    before = {name: gateway.backend(name) for name in NAMES}
    assert sum(entry["in_flight"]["requests"] for entry in before.values()) == len(streams)
    hash_before = gateway.fleet()["config_hash"]
    gateway.document["timeouts"] = {"inter_token_s": 14}
    gateway.write()
    until(lambda: gateway.fleet()["config_hash"] != hash_before, "the edit to be in force")
    for name in NAMES:
        after = gateway.backend(name)
        assert after["in_flight"]["requests"] == before[name]["in_flight"]["requests"]
        assert after["in_flight"]["context_tokens"] >= before[name]["in_flight"]["context_tokens"]
        assert after["served_requests"] == before[name]["served_requests"]
        assert after["health"]["for_s"] >= before[name]["health"]["for_s"]
    assert gateway.fleet()["retiring"] == []
    for stream in streams:
        stream.seen = b""
        stream.read_until(b"data:")
        stream.socket.close()
    gateway.await_empty_books()


def test_p48_a_stream_outlives_the_url_that_it_runs_on(gateway: GatewayProcess, engines: list[FakeEngine]) -> None:
    spare = engines[3]
    with RawStream(gateway.url, max_tokens=LONG_TOKENS).send() as stream:
        moved = next(engine for engine in engines if engine.name == stream.backend)
        stream.read_until(b" t5")
        gateway.edit_backends({moved.name: {"url": spare.url, "served_model_name": spare.served_model_name}})
        until(lambda: gateway.backend(moved.name)["url"] == spare.url, "the new address to be in force")
        fleet = gateway.fleet()
        assert [(entry["name"], entry["url"]) for entry in fleet["retiring"]] == [(moved.name, moved.url)]
        assert fleet["retiring"][0]["in_flight"]["requests"] == 1
        assert gateway.in_flight(moved.name) == 0, "the new one starts with empty books"
        known = len(spare.requests())
        with OpenLoad(gateway.url, RATE_PER_S, SHAPE) as load:
            until(lambda: served_by(load.records)[moved.name] >= 3, "the new address to serve")
        assert not failures(load.records)
        assert len(spare.requests()) - known == served_by(load.records)[moved.name]
        stream.read_to_end()
        assert stream.ended_well
        assert b" t%d" % (LONG_TOKENS - 1) in stream.seen
    until(lambda: gateway.fleet()["retiring"] == [], "the old address to be let go")
    gateway.await_empty_books()
