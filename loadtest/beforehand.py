"""What can be known of a load test before it starts: whether it could pass, and whether there is what it asks for.

A run of minutes that was lost from the first second says so only at its end, and then in the words of its symptoms.
"""

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from loadtest.fake_engine.cards import UnknownCard, find_card
from loadtest.openai_stream import Endpoint
from loadtest.verdict import Threshold
from policies.registry import PolicyError, PolicySpec, build_pipeline

PATIENCE_S = 10.0
MAX_LISTED = 20


class Hopeless(Exception):
    """The run could not take place, or could not pass; the message says why and what would be right."""


def check_schedule(planned: int, rate_per_s: float, thresholds: Sequence[Threshold]) -> None:
    """Whether the schedule holds as many requests as the thresholds ask for. Raises `Hopeless`."""
    for threshold in thresholds:
        if threshold.name == "requests" and threshold.must_be == ">=" and planned < threshold.limit:
            # A Poisson count of 1.3 times the limit falls short of it once in a hundred times or less.
            needed_s = 1.3 * threshold.limit / rate_per_s
            raise Hopeless(
                f"the schedule holds {planned} requests, and the thresholds ask for {threshold.limit:g} at least. "
                f"At {rate_per_s:g} a second, --duration {math.ceil(needed_s)} would do; or judge by a file "
                "of your own: --thresholds"
            )


def check_fleet(cards: Sequence[str], policy: str, faults: Mapping[str, Sequence[str]]) -> None:
    """Whether the fleet that the run would start can be. Raises `Hopeless`."""
    try:
        build_pipeline(PolicySpec(policy))
    except PolicyError as error:
        raise Hopeless(f"--policy: {error}") from None
    for name in cards:
        try:
            find_card(name)
        except UnknownCard as error:
            raise Hopeless(f"--cards: {error.args[0]}") from None
    for name in faults:
        if name not in cards:
            raise Hopeless(f"--fault: {name!r} is none of the cards of this run: {', '.join(cards)}")


def check_host(host: str, model: str, api_key_env: str) -> None:
    """Whether somebody answers there, lets us in, and has the model. A server that lists no models is taken at its
    word. Raises `Hopeless`."""
    try:
        endpoint = Endpoint.parse(host)
    except ValueError as error:
        raise Hopeless(f"--host: {error}") from None
    if api_key_env and not os.environ.get(api_key_env):
        raise Hopeless(f"--api-key-env: the environment variable {api_key_env} is empty")
    scheme, name = "https" if endpoint.tls else "http", f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
    headers = {"authorization": f"Bearer {os.environ[api_key_env]}"} if api_key_env else {}
    base_url = f"{scheme}://{name}:{endpoint.port}{endpoint.base_path}/v1"
    # As the load itself: past any proxy of the environment.
    with httpx.Client(base_url=base_url, headers=headers, timeout=PATIENCE_S, trust_env=False) as client:
        listed = _get(client, host, "/models")
        if listed.status_code in (401, 403):
            key = "is refused" if api_key_env else "is wanted; name the variable that holds one: --api-key-env"
            raise Hopeless(f"{host} answers {listed.status_code}: an API key {key}")
        names = _names_in(listed)
        # An alias is served and not listed.
        if names is None or model in names or _get(client, host, f"/models/{model}").is_success:
            return
    known = ", ".join(names[:MAX_LISTED]) + (", …" if len(names) > MAX_LISTED else "")
    raise Hopeless(f"{host} does not serve the model {model!r}; it knows: {known or 'none'} (--model)")


def _get(client: httpx.Client, host: str, path: str) -> httpx.Response:
    try:
        return client.get(path)
    except httpx.TransportError as error:
        raise Hopeless(f"nobody answers on {host}: {error}") from None


def _names_in(answer: httpx.Response) -> list[str] | None:
    """The models that an OpenAI-like server lists; `None` where it does not."""
    try:
        document: Any = answer.json() if answer.is_success else None
    except ValueError:
        return None
    listed = document.get("data") if isinstance(document, dict) else None
    if not isinstance(listed, list):
        return None
    return [str(entry["id"]) for entry in listed if isinstance(entry, dict) and "id" in entry]
