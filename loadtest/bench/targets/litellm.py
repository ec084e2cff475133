"""LiteLLM's proxy as it is installed: one worker, no database, each engine a deployment of one model."""

import json

from loadtest.bench.targets.target import MODEL, Launch, Site, Target


def launch(site: Site) -> Launch:
    """The proxy with its price list taken from the package, so that it starts without a network."""
    document = {
        "model_list": [
            {"model_name": MODEL,
             "litellm_params": {"model": f"openai/{MODEL}", "api_base": f"{url}/v1", "api_key": "none"}}
            for url in site.engine_urls
        ],
        "general_settings": {"master_key": site.key},
        "litellm_settings": {"telemetry": False},
    }
    # JSON is YAML as well.
    return Launch(
        ("--config", f"{site.folder}/litellm.yaml", "--host", "127.0.0.1", "--port", str(site.port)),
        {"litellm.yaml": json.dumps(document, indent=1)},
        {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR", "LITELLM_MODE": "PRODUCTION"})


TARGET = Target("litellm", "litellm", "pip install 'litellm[proxy]'", launch, distribution="litellm",
                start_limit_s=90.0)
