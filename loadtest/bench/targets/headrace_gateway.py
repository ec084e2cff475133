"""Our own gateway, one worker, with everything on: keys, prices, promises, timeouts, retries, health checks."""

import json
from collections.abc import Mapping
from dataclasses import asdict, replace

from compiled import SOURCES, VARIABLE, CompiledError, form, usable
from loadtest.bench.targets.target import MODEL, Launch, Site, Target
from loadtest.fake_engine.cards import load_cards

KEY_VARIABLE = "HEADRACE_BENCH_KEY"
COMPILED = SOURCES / ".compiled"
"""Where `make compiled` leaves the compiled form."""


def fleet_document(site: Site) -> Mapping[str, object]:
    """A fleet of unlike cards with measured step times and real prices, all of them answered by the mock."""
    cards = [card for card in load_cards().values() if card.model == "Qwen3-32B"]
    backends = []
    for url, card in zip(site.engine_urls, cards, strict=False):
        coefficients = {name: value for name, value in asdict(card.coefficients).items() if value is not None}
        backends.append({
            "name": card.id, "url": url, "engine": "vllm", "model": MODEL,
            "card": {"type": card.hardware, "count": card.devices}, "quantization": card.quantization,
            "parallel": {"tp": card.devices}, "price_per_hour": card.price_per_hour,
            "context_tokens": 1_000_000, "slots": 512, "coefficients": coefficients,
        })
    return {
        "version": 1,
        "listen": {"host": "127.0.0.1", "port": site.port},
        "admin": {"host": "127.0.0.1", "port": site.side_port},
        "auth": {"api_keys_env": [KEY_VARIABLE]},
        "models": [{"name": MODEL}],
        "latency_classes": [{"name": "interactive", "ttft_s": 2.0, "inter_token_s": 0.15, "e2e_s": 60.0},
                            {"name": "batch"}],
        "default_latency_class": "interactive",
        "policy": {"name": "headrace"},
        "backends": backends,
        # A held stream idles for the length of a run; engines do not.
        "timeouts": {"connect_s": 2, "first_token_s": 30, "inter_token_s": 60, "total_s": 600},
        "retries": {"max_attempts": 3, "budget_ratio": 0.2},
        "limits": {"max_in_flight": 16_384},
        "poll": {"interval_s": 1.0, "timeout_s": 1.0},
        "decision_log": {"path": "decisions.jsonl"},
    }


def launch(site: Site) -> Launch:
    """`headrace serve` of this checkout."""
    return Launch(("serve", "--config", f"{site.folder}/fleet.yaml"),
                  {"fleet.yaml": json.dumps(fleet_document(site), indent=1)}, {KEY_VARIABLE: site.key})


def launch_compiled(site: Site) -> Launch:
    """The same, its hot path compiled."""
    interpreted = launch(site)
    return replace(interpreted, environment={**interpreted.environment, VARIABLE: str(COMPILED)})


def compiled_form() -> str | None:
    """What `make compiled` left, if these sources are what it was made of."""
    try:
        return usable(COMPILED).form
    except CompiledError:
        return None


TARGET = Target("headrace", "headrace", "it is this program", launch, distribution="headrace", start_limit_s=40.0,
                by_interpreter=("-m", "headrace"), form=form)
COMPILED_TARGET = replace(TARGET, name="headrace-compiled", program="headrace, compiled from what is here,",
                          install="make compiled", launch=launch_compiled, form=compiled_form)
