"""Fitting coefficients to samples, and keeping them."""

import asyncio
import datetime
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("numpy", reason="needs the `engines` extra")

from backends.catalog.spec import Coefficients
from backends.embedded import calibrate
from backends.embedded.calibrate import (
    CalibrationError,
    DecodeSample,
    PrefillSample,
    Samples,
    engine_key,
    fit,
    fit_non_negative,
    load,
    measure,
    name_version,
    save,
)

pytestmark = pytest.mark.real_time

PROMPTS = (32, 128, 256)
STEPS = ((1, 40.0), (1, 140.0), (1, 260.0), (4, 50.0))

ms = st.floats(0.5, 50)


def samples_of(truth: Coefficients) -> Samples:
    a, per_token, per_pair, c, per_seq, per_seq_token = figures(truth)
    return Samples(
        tuple(PrefillSample(n, a + per_token * n + per_pair * n * n / 2) for n in PROMPTS),
        tuple(DecodeSample(b, ctx, c + per_seq * b + per_seq_token * b * ctx) for b, ctx in STEPS),
    )


def figures(coefficients: Coefficients) -> tuple[float, ...]:
    return (
        coefficients.prefill_base_ms, coefficients.prefill_ms_per_token, coefficients.prefill_ms_per_pair,
        coefficients.decode_base_ms, coefficients.decode_ms_per_seq, coefficients.decode_ms_per_seq_token,
    )


truths = st.builds(
    lambda *values: Coefficients("v", "s", *values),
    st.floats(5, 50), st.floats(0.1, 5), st.floats(1e-3, 1e-2),
    st.floats(0.5, 10), st.floats(0.5, 10), st.floats(1e-3, 1e-1),
)


@given(truths)
def test_exact_samples_give_back_the_coefficients(truth: Coefficients) -> None:
    found = fit(samples_of(truth), version="v", source="s")
    assert figures(found) == pytest.approx(figures(truth), rel=1e-3, abs=1e-6)
    assert (found.host_ms, found.first_token_overhead_ms) == (0, 0)


@given(
    prefill=st.lists(st.builds(PrefillSample, st.integers(1, 4000), ms), min_size=1, max_size=12),
    decode=st.lists(st.builds(DecodeSample, st.integers(1, 8), st.floats(1, 4000), ms), min_size=1, max_size=12),
)
def test_whatever_is_measured_no_coefficient_is_negative(
    prefill: list[PrefillSample], decode: list[DecodeSample]
) -> None:
    found = fit(Samples(tuple(prefill), tuple(decode)), version="v", source="s", kv_capacity_tokens=8192)
    assert all(figure >= 0 for figure in figures(found))
    assert sum(figures(found)[:3]) > 0
    assert sum(figures(found)[3:]) > 0
    assert found.kv_capacity_tokens == 8192


def test_a_disturbed_repeat_does_not_count() -> None:
    truth = Coefficients("v", "s", 20, 1, 0.002, 2, 4, 0.01)
    clean, dice = samples_of(truth), random.Random(5)
    slow_prefill = tuple(replace(sample, ttft_ms=sample.ttft_ms * dice.uniform(1, 5)) for sample in clean.prefill)
    slow_decode = tuple(replace(sample, step_ms=sample.step_ms * dice.uniform(1, 5)) for sample in clean.decode)
    disturbed = Samples(clean.prefill + slow_prefill, slow_decode + clean.decode)
    assert figures(fit(disturbed, version="v", source="s")) == pytest.approx(
        figures(fit(clean, version="v", source="s")), rel=1e-6
    )


def test_bad_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        fit(Samples((), (DecodeSample(1, 10, 1),)), version="v", source="s")
    for target in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="positive"):
            fit_non_negative([(1.0,)], [target])


def test_what_is_saved_is_loaded_and_nonsense_is_not(tmp_path: Path) -> None:
    truth = Coefficients("2026-01-02/abcd", "s", 20, 1, 0.002, 2, 4, 0.01, kv_capacity_tokens=8192)
    path = tmp_path / "deep" / "engine.json"
    assert load(path) is None
    save(path, truth, samples_of(truth))
    assert load(path) == truth
    assert len(list(path.parent.iterdir())) == 1
    document = json.loads(path.read_text())
    for spoiled in ({"prefill_base_ms": -1}, {"decode_base_ms": float("nan")}, {"unknown": 1}):
        path.write_text(json.dumps({"coefficients": document["coefficients"] | spoiled}))
        assert load(path) is None
    path.write_text("{")
    assert load(path) is None


def test_the_key_changes_with_all_that_changes_speed() -> None:
    base: dict[str, Any] = {
        "gguf_sha256": "a", "threads": 1, "slots": 4, "context_tokens": 2048, "library_version": "1",
    }
    others = [base | {name: "b" if isinstance(value, str) else value + 1} for name, value in base.items()]
    keys = [engine_key(**fields) for fields in (base, *others)]
    assert len(set(keys)) == len(keys)
    assert keys[0] == engine_key(**base)


def test_a_version_is_a_day_and_a_mark() -> None:
    first, second = (samples_of(Coefficients("v", "s", base, 1, 0, 1, 1, 0)) for base in (10, 11))
    day = datetime.date(2026, 11, 29)
    assert name_version(day, first).startswith("2026-11-29/")
    assert len(name_version(day, first)) == len("2026-11-29/3f2a")
    assert name_version(day, first) != name_version(day, second)


# --- measuring a small engine of known pace

PREFILL_S_PER_WORD, STEP_S = 0.0005, 0.01


@asynccontextmanager
async def engine_of_known_pace(status: int = 200) -> AsyncIterator[tuple[str, list[str]]]:
    """Streams completions: `PREFILL_S_PER_WORD` a prompt word, then `STEP_S` a token for however many streams."""
    prompts: list[str] = []

    async def answer(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        prompts.append(body["prompt"])
        writer.write(f"HTTP/1.1 {status} X\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n".encode())
        if status != 200:
            return
        words = len(body["prompt"].split())
        await asyncio.sleep(words * PREFILL_S_PER_WORD)
        for _ in range(body["max_tokens"]):
            writer.write(b'data: {"choices": [{"text": "x"}]}\n\n')
            await asyncio.sleep(STEP_S)
        usage = {"prompt_tokens": words, "completion_tokens": body["max_tokens"]}
        writer.write(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n".encode())

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = int(head.partition(b"content-length:")[2].split()[0])
        await answer(json.loads(await reader.readexactly(length)), writer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", prompts
    await asyncio.sleep(0.01)       # connections close a turn of the loop later


def test_the_plan_measures_prefill_by_size_and_decode_by_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "ENGINE_TIME_S", 0.0)     # one round

    async def scenario() -> tuple[Samples, list[str], list[tuple[int, int]]]:
        steps: list[tuple[int, int]] = []
        async with engine_of_known_pace() as (url, prompts):
            found = await measure(url, "m", 4, rng=random.Random(1), progress=lambda *step: steps.append(step))
            return found, prompts, steps

    found, prompts, steps = asyncio.run(scenario())
    assert len({prompt.split()[0] for prompt in prompts}) == len(prompts) == 1 + 3 + 4      # none shares a beginning
    assert [sample.streams for sample in found.decode] == [1, 1, 1, 4]
    sizes = [sample.prompt_tokens for sample in found.prefill]
    assert sizes == sorted(sizes)
    # Sleeps never end early, and a busy machine only adds.
    assert all(s.ttft_ms >= s.prompt_tokens * PREFILL_S_PER_WORD * 1e3 * 0.9 for s in found.prefill)
    assert all(s.step_ms >= STEP_S * 1e3 * 0.5 for s in found.decode)
    assert steps[-1] == (5, 5)
    assert steps == sorted(steps)


@pytest.mark.parametrize("status", [404, 500])
def test_an_engine_that_refuses_is_told(status: int) -> None:
    async def scenario() -> None:
        async with engine_of_known_pace(status) as (url, _):
            await measure(url, "m", 4, rng=random.Random(1))

    with pytest.raises(CalibrationError, match=rf"m at .* could not be measured.*{status}"):
        asyncio.run(scenario())


def test_an_engine_that_is_not_there_is_told() -> None:
    with pytest.raises(CalibrationError, match="could not be measured"):
        asyncio.run(measure("http://127.0.0.1:9", "m", 1, rng=random.Random(1)))
