"""Waits for an engine that is being started, and has it answer a few short requests before callers do.

A first request pays for what an engine puts off until then (graphs, kernels, caches); a caller's budget should not.
These requests go to the engine past the routing, so no book of the fleet knows them.
"""

import asyncio
from collections.abc import Callable

import httpx

from backends.catalog.spec import BackendSpec
from backends.engines import DIALECTS

POLL_S = 0.05
REQUEST_TIMEOUT_S = 120.0
PROMPT = "Say in a few words what a headrace is. " * 4
MAX_TOKENS = 8


async def warm_up(spec: BackendSpec, requests: int, tell: Callable[[str], None]) -> None:
    """Return once the engine is healthy and has answered `requests` requests; `tell` says what it waits for.

    Tries for ever: whoever asked decides when that is too long, and cancels.
    """
    url = spec.url.rstrip("/")
    headers = {"authorization": f"Bearer {spec.api_key}"} if spec.api_key else {}
    health = url + DIALECTS[spec.engine].health_path
    body = {"model": spec.served_model_name, "max_tokens": MAX_TOKENS,
            "messages": [{"role": "user", "content": PROMPT}]}
    async with httpx.AsyncClient(headers=headers, timeout=REQUEST_TIMEOUT_S, trust_env=False) as client:
        left, said = max(0, requests), ""

        def say(words: str) -> None:
            nonlocal said
            if words != said:
                said = words
                tell(words)

        say("waiting for the engine")
        while not await _answers(client, "GET", health):  # noqa: ASYNC110  nobody here would set an event
            await asyncio.sleep(POLL_S)
        while left:
            say("warming up")
            if await _answers(client, "POST", f"{url}/v1/chat/completions", body):
                left -= 1
            else:
                say("warm-up requests fail")
                await asyncio.sleep(10 * POLL_S)


async def _answers(client: httpx.AsyncClient, method: str, url: str, body: object = None) -> bool:
    try:
        return (await client.request(method, url, json=body)).is_success
    except httpx.HTTPError:
        return False
