"""The fleet file: what is accepted, what becomes of it, and what each mistake is told."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.catalog.health import HealthRules
from backends.catalog.spec import ParallelLayout
from policies.admission import ClassRules
from policies.facts import Budget
from policies.hedging import HedgeRules
from router.config.fleet_file import ConfigError, LoadedFleet, Problem, load_fleet, load_fleet_bytes
from router.request.generation import Generation

FLEETS = Path(__file__).resolve().parent.parent / "fixtures" / "fleets"
SMALL = (FLEETS / "small.yaml").read_text(encoding="utf-8")
SECRET = "sk-do-not-print-me"


def load(text: str, environ: Mapping[str, str] | None = None) -> LoadedFleet:
    return load_fleet_bytes(text.encode(), "fleet.yaml", environ or {})


def edited(before: str, after: str) -> str:
    assert before in SMALL
    return SMALL.replace(before, after, 1)


def problems(text: str, environ: Mapping[str, str] | None = None) -> tuple[Problem, ...]:
    with pytest.raises(ConfigError) as caught:
        load(text, environ)
    return caught.value.problems


def test_a_backend_becomes_its_spec_with_every_field() -> None:
    text = edited("    weight: 2\n", "    weight: 2\n    api_key_env: LLAMA_KEY\n")
    loaded = load(text, {"LLAMA_KEY": SECRET + "\n"})
    first, second = loaded.specs
    assert (first.name, first.served_model_name, first.slots) == ("llama-f16", "smollm2-f16", 2)
    assert (first.card_type, first.card_count, first.parallel) == ("cpu-avx2", 1, ParallelLayout())
    assert second.url == "http://127.0.0.1:9002"  # the trailing slash is gone
    assert second.served_model_name == second.model == "smollm2-135m-instruct"
    assert (second.weight, second.price_per_hour, dict(second.labels)) == (2.0, 0.20, {"pool": "edge"})
    assert (first.api_key, second.api_key) == (None, SECRET)


def test_hedging_is_off_unless_it_is_asked_for() -> None:
    assert Generation.of(load(SMALL)).hedging is None
    found = Generation.of(load(edited("models:", "hedging: {enabled: true, after: 0.95}\nmodels:"))).hedging
    assert found == HedgeRules(after=0.95, classes=frozenset())


def test_hedging_without_a_second_backend_is_doubted() -> None:
    start = SMALL.index("  - name: llama-q4")
    (warning,) = load(SMALL[:start].replace("models:", "hedging: {enabled: true}\nmodels:")).warnings
    assert "no model with a second backend" in warning.message


def test_defaults_are_those_of_the_rooms_that_use_them() -> None:
    config = load(SMALL).config
    assert config.health_rules() == HealthRules()
    assert config.policy_spec().name == "headrace"
    assert (config.admin.port, config.timeouts.total_s, config.retries.max_attempts) == (8081, None, 3)


def test_budgets_are_looked_up_by_class() -> None:
    config = load(SMALL).config
    assert config.budget_of("interactive") == Budget(ttft_s=1.0, inter_token_s=0.15, e2e_s=30)
    assert config.budget_of("batch") == Budget()
    with pytest.raises(KeyError):
        config.budget_of("gold")


def test_classes_bring_their_rules_of_admission() -> None:
    text = edited("{name: batch}", "{name: batch, priority: -5, sheddable: true, reserved_share: 0.07, max_queue: 3}")
    loaded = load(text.replace("models:", "limits: {max_in_flight: 100, max_waiting: 9}\nmodels:", 1))
    rules = loaded.config.admission_rules()
    assert (rules.max_in_flight, rules.max_waiting, rules.floors) == (100, 9, {"batch": 7})
    assert rules.classes == {"interactive": ClassRules(), "batch": ClassRules(0.07, 3)}
    generation = Generation.of(loaded)
    assert generation.admission == rules
    batch = generation.vocabulary.latency_classes["batch"]
    assert (batch.priority, batch.sheddable) == (-5, True)
    longer = generation.vocabulary.timeouts_for(batch, Budget(ttft_s=9.0))
    assert (batch.timeouts.first_token_s, longer.first_token_s) == (30, 90)


@pytest.mark.parametrize(("count", "share"), [(3, 1 / 3), (10, 0.1), (7, 1 / 7)])
def test_shares_that_fill_the_room_to_the_brim_pass(count: int, share: float) -> None:
    classes = "".join(f"  - {{name: c{number}, reserved_share: {share!r}}}\n" for number in range(count))
    text = edited("  - {name: batch}\n", classes + "  - {name: batch, reserved_share: 0.0}\n")
    assert len(load(text).config.admission_rules().floors) == count


def test_a_policy_in_full_reaches_the_pipeline() -> None:
    policy = """policy:
  filters: [serves_model, alive]
  prices: [request_cost, {name: drain_time, price_per_s: 0.003}]
  picker: {name: cheapest, explore_share: 0.5}
models:"""
    loaded = load(edited("models:", policy))
    assert [part.name for part in loaded.pipeline.filters] == ["serves_model", "alive"]
    assert [part.name for part in loaded.pipeline.prices] == ["request_cost", "drain_time"]
    assert loaded.pipeline.picker.name == "cheapest"
    spec = loaded.config.policy_spec()
    assert spec.prices is not None
    assert spec.prices[1].settings == {"price_per_s": 0.003}


@pytest.mark.parametrize(("before", "after", "line", "path", "message", "hint"), [
    ("    weight: 2", "    wieght: 2", 27, "backends[1].wieght", "unknown setting", 'did you mean "weight"?'),
    ("    weight: 2", "    weight: -1", 27, "backends[1].weight", "must be ≥ 0, got -1", "drains"),
    ("    weight: 2", "    weight: .nan", 27, "backends[1].weight", "finite number, got .nan", "weight: 1.0"),
    ("    weight: 2", "    weight: 1e999", 27, "backends[1].weight", "finite number, got infinity", "weight: 1.0"),
    ("    weight: 2", "    weight: '2'", 27, "backends[1].weight", 'a number, got the text "2"', "without quotes: 2"),
    ("    weight: 2", "    weight: true", 27, "backends[1].weight", "a number, got true", "weight: 1.0"),
    ("    weight: 2", "    weight:", 27, "backends[1].weight", "a number, got nothing", "weight: 1.0"),
    ("slots: 2", "slots: 2.5", 18, "backends[0].slots", "a whole number, got 2.5", "slots: 256"),
    ("pool: edge", "pool: 7", 28, "backends[1].labels.pool", "must be text, got 7", 'in quotes: "7"'),
    ("pool: edge", "'a b': x", 28, "backends[1].labels", 'has the key "a b"', None),
    ("port: 8080", "port: 70000", 2, "listen.port", "must be ≤ 65535", "TCP port"),
    ("host: 127.0.0.1", "host: 'http://x'", 2, "listen.host", "without scheme", "127.0.0.1"),
    ("aliases: [smollm2]", "aliases: smollm2", 5, "models[0].aliases", "must be a list", "aliases: [qwen3]"),
    ("card: {type: cpu-avx2, count: 1}", "card: cpu", 16, "backends[0].card", "must be a mapping", "{type: h100"),
    ("card: {type: cpu-avx2, count: 1}", "card: {count: 1}", 16, "backends[0].card.type", "is missing", "type: h100"),
    ("version: 1", "version: 2", 1, "version", "must be 1, got 2", "version: 1"),
    ("engine: llamacpp", "engine: lamacpp", 13, "backends[0].engine", 'known engine: "lamacpp"', '"llamacpp"?'),
    ("    model: smollm2-135m-instruct", "    model: smolm2-135m", 14, "backends[0].model", "names no", "did you"),
    ("    model: smollm2-135m-instruct", "    model: smollm2", 14, "backends[0].model", "is an alias", "smollm2-135m"),
    ("name: llama-q4", "name: llama-f16", 20, "backends[1].name", "already backends[0]", "unique"),
    ("name: llama-q4", "name: 'a b'", 20, "backends[1].name", "letters, digits", None),
    ("{name: batch}", "{name: interactive}", 8, "latency_classes[1].name", "already latency_classes[0]", "unique"),
    ("ttft_s: 1.0", "ttft_s: 60", 7, "latency_classes[0].ttft_s", "≤ e2e_s, got 60 > 30", None),
    ("[smollm2]", "[a, a]", 5, "models[0].aliases[1]", "already an alias of models[0]", "one model only"),
    ("[smollm2]", "[smollm2-135m-instruct]", 5, "models[0].aliases[0]", "already the name of models[0]", None),
    ("class: interactive", "class: interctive", 9, "default_latency_class", "no latency class", '"interactive"?'),
    ("ttft_s: 1.0", "reserved_share: 1.5", 7, "latency_classes[0].reserved_share", "≤ 1, got 1.5", "kept free"),
    ("ttft_s: 1.0", "sheddable: 1", 7, "latency_classes[0].sheddable", "must be true or false", "sheddable: true"),
    ("ttft_s: 1.0", "priority: 0.5", 7, "latency_classes[0].priority", "a whole number, got 0.5", "priority: 10"),
    ("ttft_s: 1.0", "max_queue: -1", 7, "latency_classes[0].max_queue", "must be ≥ 0, got -1", "wait at once"),
    ("  - {name: batch}", "  - {name: batch, reserved_share: 0.6}\n  - {name: x, reserved_share: 0.5}", 9,
     "latency_classes[2].reserved_share", "to 1.1, and there is 1", "reserve only"),
    ("models:", "hedging: {enabled: true, latency_classes: [intractive]}\nmodels:", 3, "hedging.latency_classes[0]",
     "no latency class", '"interactive"?'),
    ("models:", "hedging: {budget_ratio: 0.3}\nmodels:", 3, "hedging.budget_ratio", "≤ 0.25, got 0.3", "all traffic"),
    ("models:", "hedging: {after: 0.4}\nmodels:", 3, "hedging.after", "must be ≥ 0.5, got 0.4", "late when"),
    ("models:", "hedging: {after: 1}\nmodels:", 3, "hedging.after", "must be ≤ 0.9999, got 1", "late when"),
    ("models:", "admin: {port: 8080}\nmodels:", 3, "admin.port", "the port that clients use", "8081"),
    ("models:", "timeouts: {total_s: 5, inter_token_s: 6}\nmodels:", 3, "timeouts.inter_token_s", "≤ timeouts.", None),
    ("models:", "policy: {name: cheep}\nmodels:", 3, "policy.name", "cheep", None),
    ("models:", "policy: {filters: [alife]}\nmodels:", 3, "policy.filters[0]", "alife", None),
    ("models:", "policy: {picker: {name: cheapest, explore_share: [1]}}\nmodels:", 3, "policy.picker.explore_share",
     "must be a finite number, text", None),
    ("models:", "policy: {picker: {name: cheapest, explor_share: 1}}\nmodels:", 3, "policy.picker.explor_share",
     "explor_share", None),
])
def test_a_mistake_is_told_with_its_line_and_what_would_be_right(
    before: str, after: str, line: int, path: str, message: str, hint: str | None
) -> None:
    found, *others = problems(edited(before, after))
    assert others == []
    assert found.line == line
    assert found.path.startswith(path)
    assert message in found.message
    if hint is not None:
        assert hint in (found.hint or "")


@pytest.mark.parametrize(("url", "message"), [
    ("127.0.0.1:9001", "must begin with http"), ("ftp://host", "must begin with http"), ("http://", "must name a host"),
    ("http://host/v1", "without /v1"), ("http://host/v1/", "without /v1"), ("http://host/api", "must not hold a path"),
    ("http://host?key=1", "query or fragment"), ("http://host#x", "query or fragment"),
    ("http://host:99999", "cannot be read"), ("http://host:0", "port other than 0"), ("'http://ho st'", "spaces"),
    (f"http://me:{SECRET}@host", "user or password"),
])
def test_a_url_is_a_bare_base_address(url: str, message: str) -> None:
    (found,) = problems(edited("http://127.0.0.1:9001", url))
    assert message in found.message
    assert SECRET not in repr(found)


@pytest.mark.parametrize("url", ["http://[::1]:8000", "https://engine.internal", "http://Engine-7:8000/"])
def test_common_urls_pass(url: str) -> None:
    assert load(edited("http://127.0.0.1:9001", url)).specs[0].url == url.rstrip("/").lower()


@pytest.mark.parametrize("setting", [f"api_key: {SECRET}", f"api_key_env: {SECRET}", f"apikey: [{SECRET}]"])
def test_a_secret_pasted_into_the_file_is_refused_and_never_printed(setting: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(edited("    weight: 2", f"    {setting}"))
    assert caught.value.problems[0].line == 27
    assert SECRET not in repr(caught.value) + str(caught.value) + repr(caught.value.problems)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__  # the underlying error, which has the input, is not shown


def test_a_missing_key_says_which_and_where_and_a_found_one_is_never_printed() -> None:
    text = edited("    weight: 2", "    api_key_env: LLAMA_KEY")
    for environ in ({}, {"LLAMA_KEY": ""}):
        (found,) = problems(text, environ)
        assert (found.line, found.path) == (27, "backends[1].api_key_env")
        assert "LLAMA_KEY is not set" in found.message
    (found,) = problems(text, {"LLAMA_KEY": f"{SECRET}\nx-evil: 1"})
    assert "HTTP header" in found.message
    assert SECRET not in repr(found)
    loaded = load(text, {"LLAMA_KEY": SECRET})
    assert SECRET not in repr(loaded) + str(loaded.config.model_dump())
    with pytest.raises(ConfigError, match="LLAMA_KEY is not set"):
        loaded.config.backend_specs({})


def test_all_problems_are_told_at_once_in_the_order_of_the_file() -> None:
    text = SMALL.replace("port: 8080", "port: x").replace("slots: 2", "slots: 0").replace("weight: 2", "weight: -2")
    assert [problem.line for problem in problems(text)] == [2, 18, 27]


def test_coefficients_are_finite_not_negative_and_bounded() -> None:
    good = ("    coefficients: {version: v, source: s, prefill_base_ms: 9, prefill_ms_per_token: 0.04, "
            "prefill_ms_per_pair: 1.5e-06, decode_base_ms: 9.6, decode_ms_per_seq: 0.02, decode_ms_per_seq_token: 0.0}")
    coefficients = load(edited("    weight: 2", good)).specs[1].coefficients
    assert coefficients is not None
    assert (coefficients.prefill_ms_per_pair, coefficients.host_ms) == (1.5e-06, 0.0)
    for bad in ("-1", ".inf", ".nan", "1e9"):
        (found,) = problems(edited("    weight: 2", good.replace("decode_base_ms: 9.6", f"decode_base_ms: {bad}")))
        assert found.path == "backends[1].coefficients.decode_base_ms"
    (found,) = problems(edited("    weight: 2", good.replace("decode_base_ms: 9.6, ", "")))
    assert "is missing" in found.message


def test_p47_weight_0_is_accepted_and_only_warned_of_when_nothing_is_left() -> None:
    drained = load(edited("weight: 2", "weight: 0"))
    assert (drained.specs[1].weight, drained.warnings) == (0.0, ())
    all_drained = load(SMALL.replace("weight: 2", "weight: 0").replace("slots: 2", "weight: 0"))
    (warning,) = all_drained.warnings
    assert "every backend" in warning.message
    assert warning.line == 4


@pytest.mark.parametrize(("before", "after", "line", "message"), [
    ("    price_per_hour: 0.20\n", "", 20, "counts as free"),
    ("    slots: 2", "    parallel: {tp: 4}", 18, "tp·pp·dp = 4 cards, but card.count is 1"),
    ("models:", "models:\n  - name: qwen", 4, "no backend serves"),
    ("http://127.0.0.1:9002/\n", "http://127.0.0.1:9001\n    served_model_name: smollm2-f16\n", 21, "the same engine"),
    ("    labels: {pool: edge}\n", "    labels: {pool: edge}", 1, "cut short"),
    ("{name: batch}", "{name: batch, reserved_share: 0.0001}", 8, "is not one request"),
    ("{name: batch}", "{name: batch, reserved_share: 1.0}", 7, "reserved for other classes"),
    ("{name: batch}", "{name: batch, max_queue: 300}", 8, "more than limits.max_waiting, 256"),
    ("models:", "hedging: {enabled: true, latency_classes: [batch]}\nmodels:", 3, "neither ttft_s nor e2e_s"),
    ("models:", "hedging: {enabled: true, budget_ratio: 0, budget_floor_per_s: 0}\nmodels:", 3, "a budget of nothing"),
])
def test_doubtful_files_load_with_a_warning(before: str, after: str, line: int, message: str) -> None:
    (warning,) = load(edited(before, after)).warnings
    assert message in warning.message
    assert warning.line == line


def test_the_hash_names_the_content_not_the_text() -> None:
    reference = load(SMALL).config_hash
    assert len(reference) == 12
    assert load("# a comment\n" + edited("weight: 2", "weight: 2.0")).config_hash == reference
    assert load(edited("models:", "currency: USD\nmodels:")).config_hash == reference  # a default, spelled out
    assert load(edited("weight: 2", "weight: 3")).config_hash != reference


def test_settings_can_be_shared_by_anchor_and_what_a_backend_says_itself_wins() -> None:
    text = edited("  - name: llama-f16", "  - &first\n    name: llama-f16")
    text = text[: text.index("  - name: llama-q4")] + (
        "  - <<: *first\n    name: llama-copy\n    url: http://127.0.0.1:9003\n"
        "  - {<<: [*first], name: third, url: 'http://127.0.0.1:9004'}\n")
    first, copy, third = load(text).specs
    assert (copy.name, copy.url, copy.quantization) == ("llama-copy", "http://127.0.0.1:9003", first.quantization)
    assert third.price_per_hour == first.price_per_hour
    (found,) = problems(text.replace("slots: 2", "slots: 0").replace("  - {<<", "  #")[:-1])[:1]
    assert found.path == "backends[0].slots"


def test_a_loaded_file_is_read_from_disk(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(SMALL)
    assert load_fleet(path, {}).config_hash == load(SMALL).config_hash
    path.write_text("version: 3\n")
    with pytest.raises(ConfigError) as caught:
        load_fleet(path, {})
    assert str(caught.value.problems[0]).startswith(f"{path}:1:1  version  must be 1")


@given(st.dictionaries(st.text(max_size=8), st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3), max_leaves=8)))
def test_any_mapping_is_either_refused_with_problems_or_loaded(content: dict[str, object]) -> None:
    text = json.dumps({"version": 1, "models": [{"name": "m"}], "backends": [content], **content})
    try:
        found = load(text).warnings
    except ConfigError as error:
        found = error.problems
    assert all(problem.line for problem in found)
    assert "\n" not in "".join(map(str, found))
