"""The Rust gateway of the SGLang project, with its prefix-aware policy left out: all prompts of a run are alike."""

from loadtest.bench.targets.target import Launch, Site, Target


def launch(site: Site) -> Launch:
    """Power of two choices over all engines."""
    return Launch((
        "launch", "--host", "127.0.0.1", "--port", str(site.port), "--worker-urls", *site.engine_urls,
        "--policy", "power_of_two", "--log-level", "error", "--max-concurrent-requests", "16384",
        "--prometheus-host", "127.0.0.1", "--prometheus-port", str(site.side_port),
    ))


TARGET = Target("sglang-router", "smg", "pip install sglang-router", launch, distribution="sglang-router",
                start_limit_s=60.0)
