"""Each dialect against a page of its engine, recorded or constructed from the project's own names."""

from pathlib import Path

import pytest

from backends.catalog.sample import LoadSample
from backends.engines import DIALECTS
from backends.engines.exposition import MAX_PAGE_BYTES, Page, read_page

PAGES = Path(__file__).parent.parent / "fixtures" / "metrics"


def sample(engine: str, page: str | bytes) -> LoadSample:
    text = page if isinstance(page, bytes) else (PAGES / page).read_bytes()
    return DIALECTS[engine].parse_metrics(text, 7.0)


def value(page: Page, name: str) -> float | None:
    (series,) = page.find(name)
    return series.value


EXPECTED = {
    ("llamacpp", "llamacpp.txt"): LoadSample(
        7.0, running_requests=2, waiting_requests=3, prompt_tokens_total=26, generated_tokens_total=0,
        prefix_cache_hit_ratio=0.0),
    ("llamacpp", "llamacpp_2024.txt"): LoadSample(
        7.0, running_requests=3, waiting_requests=1, kv_usage_ratio=0.371, prompt_tokens_total=1520,
        generated_tokens_total=4096),
    ("vllm", "vllm_v0.txt"): LoadSample(
        7.0, running_requests=8, waiting_requests=3, kv_usage_ratio=0.4375, kv_capacity_tokens=27895 * 16,
        prompt_tokens_total=91342, generated_tokens_total=27453, prefix_cache_hit_ratio=0.25, preemptions_total=2),
    ("vllm", "vllm_v1.txt"): LoadSample(
        7.0, running_requests=42, waiting_requests=12, kv_usage_ratio=0.5, kv_capacity_tokens=2 * 446320,
        prompt_tokens_total=2635700, generated_tokens_total=771000, prefix_cache_hit_ratio=0.4, preemptions_total=4),
    ("vllm-ascend", "vllm_ascend.txt"): LoadSample(
        7.0, running_requests=16, waiting_requests=1, kv_usage_ratio=0.5, kv_capacity_tokens=128_000,
        prompt_tokens_total=5000, generated_tokens_total=900),
    ("sglang", "sglang.txt"): LoadSample(
        7.0, running_requests=162, waiting_requests=2826, kv_usage_ratio=0.28, prompt_tokens_total=8128902,
        generated_tokens_total=7557572, prefix_cache_hit_ratio=0.007507552643049313),
    ("sglang", "sglang_dp2_tp2.txt"): LoadSample(
        7.0, running_requests=14, waiting_requests=3, kv_usage_ratio=0.5, kv_capacity_tokens=942516,
        prompt_tokens_total=1000, generated_tokens_total=500, preemptions_total=6),
    ("tgi", "tgi.txt"): LoadSample(
        7.0, running_requests=8, waiting_requests=5, prompt_tokens_total=12800, generated_tokens_total=8123),
}


@pytest.mark.parametrize(("engine", "page"), EXPECTED, ids=lambda part: part)
def test_a_page_becomes_a_sample(engine: str, page: str) -> None:
    assert sample(engine, page) == EXPECTED[engine, page]


def test_every_fixture_is_read_by_a_test() -> None:
    assert {path.name for path in PAGES.iterdir()} == {page for _, page in EXPECTED}


def test_the_table_has_the_engines_of_the_fleet_file() -> None:
    assert set(DIALECTS) == {"llamacpp", "vllm", "vllm-ascend", "sglang", "tgi", "openai"}
    assert all(name == dialect.name for name, dialect in DIALECTS.items())


def test_an_engine_without_metrics_knows_nothing() -> None:
    assert DIALECTS["openai"].metrics_path is None
    assert sample("openai", b"anything") == LoadSample(7.0)


def test_ascend_forks_name_the_kv_gauge_after_the_npu() -> None:
    assert sample("vllm-ascend", b'vllm:npu_cache_usage_perc{engine="0"} 0.4\n').kv_usage_ratio == 0.4
    assert sample("vllm", b'vllm:npu_cache_usage_perc{engine="0"} 0.4\n').kv_usage_ratio is None


def test_P40_both_names_at_once_count_once() -> None:
    page = b"vllm:gpu_cache_usage_perc 0.9\nvllm:kv_cache_usage_perc 0.3\n"
    assert sample("vllm", page).kv_usage_ratio == 0.3


@pytest.mark.parametrize("engine", [name for name, dialect in DIALECTS.items() if dialect.metrics_path])
@pytest.mark.parametrize("page", [
    b"", b"\x00\xff\xfe" * 100, b"<html>502 Bad Gateway</html>", b"process_cpu_seconds_total 12.5\n", b"{" * 100_000,
])
def test_P40_a_page_without_known_series_is_blank(engine: str, page: bytes) -> None:
    assert sample(engine, page) == LoadSample(7.0)
    assert sample(engine, page).is_blank


@pytest.mark.parametrize("said", ["NaN", "-1", "+Inf", "-Inf", "1e300", "1_000", "0x10", "idle", ""])
def test_P40_what_no_count_can_be_is_unknown_and_never_0(said: str) -> None:
    load = sample("vllm", f"vllm:num_requests_running {said}\nvllm:num_requests_waiting 4\n".encode())
    assert load.running_requests is None
    assert load.waiting_requests == 4


def test_P40_a_sum_with_one_unreadable_engine_is_unknown() -> None:
    page = b'vllm:num_requests_running{engine="0"} 3\nvllm:num_requests_running{engine="1"} NaN\n'
    assert sample("vllm", page).running_requests is None


@pytest.mark.parametrize(("said", "ratio"), [("0", 0.0), ("1.0000001", 1.0), ("30", None), ("NaN", None)])
def test_P40_a_percentage_is_no_ratio(said: str, ratio: float | None) -> None:
    assert sample("vllm", f"vllm:kv_cache_usage_perc {said}\n".encode()).kv_usage_ratio == ratio


def test_P40_a_page_of_10_mb_is_refused_whole() -> None:
    line = b"vllm:num_requests_running 0\n"
    assert sample("vllm", line + b"#" * MAX_PAGE_BYTES).is_blank


def test_P40_a_real_zero_is_a_zero() -> None:
    assert sample("vllm", b"vllm:num_requests_running 0.0\n").running_requests == 0


def test_capacity_waits_until_every_engine_has_profiled() -> None:
    page = (b'vllm:cache_config_info{engine="0",block_size="16",num_gpu_blocks="100"} 1\n'
            b'vllm:cache_config_info{engine="1",block_size="16",num_gpu_blocks="None"} 1\n')
    assert sample("vllm", page).kv_capacity_tokens is None


def test_labels_may_hold_anything_that_is_escaped() -> None:
    page = read_page(rb'm{a="x\"},y{",b="c\\d\n"} 5 1700000000000 # {trace_id="q"} 1' + b"\n", {"m"})
    (series,) = page.find("m")
    assert series.labels == {"a": 'x"},y{', "b": "c\\d\n"}
    assert series.value == 5


@pytest.mark.parametrize("line", [
    "m 5", "m\t5", " m  5 ", "m{} 5", 'm{a="b",} 5', "m 5\r", "m 5 1700000000000", 'm{a="b"}5', 'm { a = "b" } 5',
    "m 5 # {trace=\"x\"} 0.5 1.0",
])
def test_well_formed_lines(line: str) -> None:
    assert value(read_page(line.encode(), {"m"}), "m") == 5


@pytest.mark.parametrize("line", ["m", "m5", 'm{a="b} 5', 'm{a=b} 5', 'm{a="b" 5', "m 5 now",
    "# m 5", "mm 5", "m 5 5 5"])
def test_ill_formed_lines_are_skipped(line: str) -> None:
    assert read_page(f"{line}\nother 1".encode(), {"m"}).find("m") == ()


def test_a_series_said_twice_counts_once() -> None:
    assert read_page(b'm{a="1",b="2"} 3\nm{b="2",a="1"} 4\n', {"m"}).total("m") == 4


@pytest.mark.timeout(20)
@pytest.mark.parametrize("hostile", [
    b"m" + b" " * 1_000_000 + b"!", b"m{" + b"a" * 1_000_000, b'm{a="' + b"\\" * 1_000_001 + b'"} x',
    b"m 1" + b" " * 1_000_000 + b"x", b"m{" + b'a="b",' * 200_000 + b"} x",
])
def test_a_hostile_line_takes_linear_time(hostile: bytes) -> None:
    assert read_page(hostile, {"m"}).total("m") is None
