"""Pools, scenarios, arrivals and traces: what is laid out before any policy comes in."""

import gzip
import shutil
from collections import Counter
from importlib.resources import as_file, files
from itertools import pairwise
from math import log
from pathlib import Path
from statistics import mean, median, stdev

import pytest

from loadtest.sim.arrivals import Crowd, Steady, draw_arrivals, modulated
from loadtest.sim.classes import STANDARD
from loadtest.sim.engine import PrefixKeys
from loadtest.sim.pools import POOLS, UnknownPool, find_pool
from loadtest.sim.run import Job, lay_out
from loadtest.sim.scenarios import SCENARIOS, UnknownScenario, find_scenarios
from loadtest.sim.telling import MEASURED, told_coefficients
from loadtest.sim.traces import TraceMissing, read_azure, read_mooncake, read_servegen
from loadtest.sim.workload import Physics, dice


def job(scenario: str, seed: int = 1, rate_per_s: float | None = None, seconds: float = 400.0,
        folder: Path | None = None) -> Job:
    return Job(scenario, "site", "p2c", seed, rate_per_s or SCENARIOS[scenario].rate_per_s, seconds, folder)


@pytest.mark.parametrize("name", POOLS)
def test_pools_have_four_unlike_cards(name: str) -> None:
    backends = find_pool(name).backends
    assert [backend.family for backend in backends] == ["h100", "a100", "l40s", "910b"]
    assert len({backend.cost(1000, 0, 200) for backend in backends}) == 4
    assert all(backend.chunk_tokens >= backend.slots for backend in backends)


def test_cloned_pools_scale_their_rates() -> None:
    pool = find_pool("site:10")
    assert len({backend.name for backend in pool.backends}) == len(pool.backends) == 10
    assert pool.scale == 2.5


@pytest.mark.parametrize("name", ["sites", "site:0", "site:1001", "site:x", "site:", ""])
def test_unknown_pools_say_what_there_is(name: str) -> None:
    with pytest.raises(UnknownPool, match=r"site|1 to 1000"):
        find_pool(name)


def test_cached_tokens_make_a_request_cheaper_and_outputs_dearer() -> None:
    card = find_pool("fitted-owned").backends[1]
    assert card.cost(4000, 3000, 100) < card.cost(4000, 0, 100) < card.cost(4000, 0, 101)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_each_scenario_is_ordered_promised_and_repeatable(scenario: str) -> None:
    workload = lay_out(job(scenario, seconds=100.0))
    requests = workload.requests
    assert len(requests) > 20
    assert all(one.arrival_s <= other.arrival_s for one, other in pairwise(requests))
    assert requests[0].arrival_s >= 0
    assert requests[-1].arrival_s <= 100.0
    for request in requests:
        budget = workload.classes[request.latency_class].budget
        assert budget.ttft_s is not None
        assert budget.inter_token_s is not None
        assert request.prompt_tokens >= 1
        assert request.output_tokens >= 1
        assert len(request.prefix_keys) * workload.prefix_block_tokens <= request.prompt_tokens
    families = {backend.family for backend in find_pool("site").backends}
    assert all(0 < event.at_s < 100.0 and event.family in families for event in workload.events)
    assert lay_out(job(scenario, seconds=100.0)) == workload
    assert lay_out(job(scenario, seed=9, seconds=100.0)).requests != requests


@pytest.mark.parametrize("scenario", [name for name in SCENARIOS if name not in ("flash-crowd", "card-lent")])
def test_the_rate_is_kept_over_seeds(scenario: str) -> None:
    """Bursts and traces differ much from seed to seed; their mean is what was asked for."""
    rate = SCENARIOS[scenario].rate_per_s
    seen = mean([len(lay_out(job(scenario, seed)).requests) / 400.0 for seed in range(1, 11)])
    assert seen == pytest.approx(rate, rel=0.25 if scenario.startswith(("azure", "moon")) else 0.1)


def test_bursts_are_burstier_than_poisson() -> None:
    def dispersion(times: list[float]) -> float:
        counts = Counter(int(at_s) for at_s in times)
        per_s = [counts[second] for second in range(4000)]
        return stdev(per_s) ** 2 / mean(per_s)

    assert dispersion(draw_arrivals(Steady(6.0), 4000, dice(1))) == pytest.approx(1.0, abs=0.15)
    assert dispersion(draw_arrivals(modulated(6.0, 4000, dice(2)), 4000, dice(1))) > 1.8


def test_a_crowd_is_there_for_its_time() -> None:
    times = draw_arrivals(Crowd(Steady(10.0), 100, 200, 2.5), 300, dice(3))
    inside = sum(100 <= at_s < 200 for at_s in times)
    assert inside / 100 == pytest.approx(25, rel=0.1)
    assert (len(times) - inside) / 200 == pytest.approx(10, rel=0.1)


def test_classes_come_by_their_shares_and_sizes() -> None:
    requests = lay_out(job("steady", seconds=3000.0)).requests
    counts = Counter(request.latency_class for request in requests)
    for each in STANDARD:
        assert counts[each.name] / len(requests) == pytest.approx(each.share, abs=0.02)
        prompts = [request.prompt_tokens for request in requests if request.latency_class == each.name]
        assert median(prompts) == pytest.approx(each.prompts.median_tokens, rel=0.1)
        assert stdev(map(log, prompts)) == pytest.approx(each.prompts.spread, rel=0.12)


def test_long_prompts_are_fifteen_in_a_hundred() -> None:
    counts = Counter(request.latency_class for request in lay_out(job("long-context", rate_per_s=20.0)).requests)
    assert counts["long"] / counts.total() == pytest.approx(0.15, abs=0.01)


def test_sessions_share_what_was_said() -> None:
    workload = lay_out(job("prefix-heavy"))
    in_session = [request for request in workload.requests if request.session_key]
    assert len(in_session) / len(workload.requests) == pytest.approx(0.75, abs=0.06)
    last: dict[str, int] = {}
    continued = 0
    for request in in_session:
        assert request.session_key is not None
        if request.session_key in last:
            continued += 1
            assert request.prompt_tokens > last[request.session_key], "a turn holds all that was said before"
        last[request.session_key] = request.prompt_tokens + request.output_tokens
    assert continued > 100


def test_a_prefix_cache_forgets_the_oldest() -> None:
    cache = PrefixKeys(3)
    for key in "abcd":
        cache[key] = None
    assert list(cache) == ["b", "c", "d"]
    assert cache.hits(("b", "c", "x", "d")) == 2
    cache.move_to_end("b")
    cache["e"] = None
    assert list(cache) == ["d", "b", "e"]


def test_what_is_told_is_off_by_about_its_sigma() -> None:
    card = find_pool("site").backends[0]
    ratios = []
    for seed in range(300):
        told = told_coefficients(card, Physics(told_sigma=0.08), dice(seed))
        ratios.append(log(told.prefill_ms_per_token / card.coefficients.prefill_ms_per_token))
        assert told.chunk_tokens == card.chunk_tokens
        assert told.kv_capacity_tokens == card.kv_capacity_tokens
    assert stdev(ratios) == pytest.approx(0.08, rel=0.15)
    exact = told_coefficients(card, Physics(told_sigma=0.0), dice(1))
    assert all(getattr(exact, name) == getattr(card.coefficients, name) for name in MEASURED)


def test_scenarios_by_name() -> None:
    assert [one.name for one in find_scenarios("burst, steady")] == ["burst", "steady"]
    assert len(find_scenarios("all")) == len(SCENARIOS)
    assert [one.name for one in find_scenarios("azure-replay")] == [
        "azure-replay-0.3", "azure-replay-0.5", "azure-replay-0.7"]
    with pytest.raises(UnknownScenario, match="did you mean 'burst'"):
        find_scenarios("brust")
    with pytest.raises(UnknownScenario, match="name a scenario"):
        find_scenarios(" ,")


def test_the_extracts_are_what_their_page_says() -> None:
    assert len(read_azure("code", None)) == 8819
    assert len(read_azure("conv", None)) == 19_366
    rows = read_mooncake(None)
    assert len(rows) == 4000
    assert rows[-1].at_s == pytest.approx(1302, abs=1)
    clients = read_servegen(None)
    assert len(clients) == 15
    assert all(len(client.rates_per_s) <= 7 * 144 for client in clients)
    folder = files("loadtest.sim").joinpath("extracts")
    shipped = {one.name: len(one.read_bytes()) for one in folder.iterdir() if one.name.endswith(".gz")}
    assert sum(shipped.values()) < 1_000_000
    sources = folder.joinpath("SOURCES.md").read_text("utf-8")
    assert all(f"`{name}`" in sources for name in shipped)


def test_a_folder_with_whole_traces_takes_the_place_of_the_extracts(tmp_path: Path) -> None:
    with as_file(files("loadtest.sim").joinpath("extracts")) as extracts:
        for file in extracts.glob("*.gz"):
            shutil.copy(file, tmp_path)
    here, there = lay_out(job("azure-conv")), lay_out(job("azure-conv", folder=tmp_path))
    assert here == there


def test_a_folder_without_the_trace_says_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(TraceMissing, match=r"no azure_llm_2023_conv\.csv\.gz in .*SOURCES\.md"):
        lay_out(job("azure-conv", folder=tmp_path))


@pytest.mark.parametrize(("name", "scenario", "content"), [
    ("azure_llm_2023_conv.csv.gz", "azure-conv", gzip.compress(b"a,b\n1,2\n")),
    ("azure_llm_2023_conv.csv.gz", "azure-conv", b"no gzip at all"),
    ("mooncake_conversation_trace.jsonl.gz", "mooncake", gzip.compress(b"{}\n")),
    ("mooncake_conversation_trace.jsonl.gz", "mooncake", gzip.compress(b"[nonsense\n")),
])
def test_a_file_that_is_no_trace_is_said_to_be_none(tmp_path: Path, name: str, scenario: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TraceMissing, match=name.replace(".", r"\.")):
        lay_out(job(scenario, folder=tmp_path))


def test_windows_of_a_trace_differ_by_seed_and_thin_by_rate() -> None:
    full = {request.arrival_s for request in lay_out(job("azure-conv", rate_per_s=5.0)).requests}
    half = {request.arrival_s for request in lay_out(job("azure-conv", rate_per_s=2.5)).requests}
    assert half < full, "a lower rate keeps some of the same requests"
    assert len(half) / len(full) == pytest.approx(0.5, abs=0.05)
    more = lay_out(job("azure-conv", rate_per_s=16.0)).requests
    assert len(more) > 2 * len(full), "more than the trace has comes from windows laid over each other"


def test_mooncake_keeps_whole_conversations() -> None:
    requests = lay_out(job("mooncake", rate_per_s=1.5)).requests
    seen: set[object] = set()
    shared = 0
    for request in requests:
        shared += sum(key in seen for key in request.prefix_keys[1:])
        seen.update(request.prefix_keys)
    blocks = sum(len(request.prefix_keys) for request in requests)
    assert shared / blocks > 0.1
