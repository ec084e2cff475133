"""Figure E: an outage is not made worse by retries, and a backend that asks for silence gets it."""

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from loadtest.reliability.backend import ActingBackend
from loadtest.reliability.client import Answer, Gateway, ask, backend_entry, chat, gateway, ready
from loadtest.reliability.measured import Measured, Size, quantile
from loadtest.stack import free_ports

SECONDS = {Size.CI: 2.0, Size.LONG: 60.0}
RATE_PER_S = 60.0
SDK_RETRIES = 2
RATIO, FLOOR_PER_S = 0.2, 10.0
"""The retry budget of the gateway that is measured: its defaults."""
NO_EJECTION = {"failures_to_eject": 10_000, "failure_ratio_to_eject": None}
"""Attempts are to be bounded by the budget alone."""
SAVED = 20
"""What the budget may have saved up before the outage."""


async def figure_e(size: Size) -> list[Measured]:
    """Backends that all fail, that all ask for silence, and that are all gone."""
    return [*await _outage(SECONDS[size]), *await _silence(SECONDS[size]), *await _gone(SECONDS[size])]


async def _outage(seconds: float) -> list[Measured]:
    async with ActingBackend().serving() as one, ActingBackend().serving() as two:
        with TemporaryDirectory() as folder:
            entries = [backend_entry("b0", one.url), backend_entry("b1", two.url)]
            with gateway(Path(folder), entries, health=NO_EJECTION) as started:
                await ready(started)
                answers = await _open_load(started, seconds, {"kind": "status", "status": 503}, SDK_RETRIES)
                rest = await started.at_rest()
    attempts = sum((one.seen + two.seen).values())
    most = (1 + RATIO) * len(answers) + FLOOR_PER_S * seconds + SAVED
    return [
        Measured("E", "requests while all backends fail, SDK retries counted", len(answers)),
        Measured("E", "attempts at the backends", attempts, bound=round(most)),
        Measured("E", "attempts for each request", attempts / len(answers)),
        Measured("E", "at rest afterwards", rest, bound=1, relation="=="),
    ]


async def _silence(seconds: float) -> list[Measured]:
    """Each backend asks for two seconds with every 429."""
    asked_s = 2.0
    async with ActingBackend().serving() as one, ActingBackend().serving() as two:
        with TemporaryDirectory() as folder:
            entries = [backend_entry("b0", one.url), backend_entry("b1", two.url)]
            with gateway(Path(folder), entries) as started:
                await ready(started)
                act = {"kind": "status", "status": 429, "retry_after": round(asked_s)}
                began_s = time.monotonic()
                answers = await _open_load(started, seconds, act, 0)
                took_s = time.monotonic() - began_s
    # Requests already on their way when the first answer comes are no disregard of it.
    most = 2 * (1 + took_s / asked_s) + 6
    told = sum(answer.status == 429 and b"retry-after: " in answer.head for answer in answers)
    return [
        Measured("E", "requests while both backends ask for silence", len(answers)),
        Measured("E", "attempts at them", sum((one.seen + two.seen).values()), bound=round(most)),
        Measured("E", "answered 429 with Retry-After", told, bound=len(answers), relation="=="),
    ]


async def _gone(seconds: float) -> list[Measured]:
    ports = free_ports(2)
    entries = [backend_entry(f"b{port}", f"http://127.0.0.1:{port}") for port in ports]
    with TemporaryDirectory() as folder, gateway(Path(folder), entries) as started:
        await ready(started)
        await _open_load(started, 1.0, {}, 0)  # until the backends are known to be out
        answers = await _open_load(started, seconds, {}, 0)
        rest = await started.at_rest()
    told = sum(answer.status == 503 and b"retry-after: " in answer.head for answer in answers)
    return [
        Measured("E", "requests while all backends are gone", len(answers)),
        Measured("E", "answered 503 with Retry-After", told, bound=len(answers), relation="=="),
        Measured("E", "answered, p99", quantile([answer.took_s for answer in answers], 0.99) * 1e3, "ms", 50),
        Measured("E", "at rest afterwards", rest, bound=1, relation="=="),
    ]


async def _open_load(to: Gateway, seconds: float, act: Mapping[str, Any], sdk_retries: int) -> list[Answer]:
    """Requests at a fixed rate, each tried again at once by its client, as SDKs do; every answer counts."""
    answers: list[Answer] = []

    async def one(number: int) -> None:
        for _ in range(1 + sdk_retries):
            answers.append(await ask(to, chat(stream=number % 2 == 0, act=act)))
            if answers[-1].ended == "whole":
                return

    loop = asyncio.get_running_loop()
    began_s, tasks = loop.time(), []
    for number in range(round(seconds * RATE_PER_S)):
        await asyncio.sleep(max(0.0, began_s + number / RATE_PER_S - loop.time()))
        tasks.append(asyncio.create_task(one(number)))
    await asyncio.gather(*tasks)
    return answers
