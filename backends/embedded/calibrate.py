"""Measures what an engine takes per step, once per machine, through its own OpenAI endpoint.

The plan is small, so that three engines take seconds: streams with prompts of three sizes give prefill time by size
and decode time by context, one round of as many streams as the engine has slots gives decode time by batch. `fit`
turns the samples into `Coefficients`. Times are the client's, so they hold what a router will see.

An engine keeps the prompts it has seen, so each prompt is new from its first word, and tokens that the engine says it
took from cache are not counted.
"""

import asyncio
import contextlib
import datetime
import hashlib
import itertools
import json
import math
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import httpx
import numpy as np

from backends.catalog.spec import Coefficients

PLAN = 2
"""Raised when the plan below or the fit changes: older measurements are then made anew."""
SOURCE = "measured on this machine by headrace up"
PROMPT_WORDS = (24, 96, 192)
SINGLE_OUTPUT_TOKENS = 12
BATCH_PROMPT_WORDS = 24
BATCH_OUTPUT_TOKENS = 16
ENGINE_TIME_S = 2.5
"""Rounds are repeated until this much time is spent: repeats only steady the figures."""
MAX_ROUNDS = 3
REQUEST_TIMEOUT_S = 60.0
_WORDS = ("river", "stone", "cloud", "lamp", "music", "tree", "harbour", "winter", "copper", "garden", "signal")


class CalibrationError(RuntimeError):
    """The engine could not be measured; the text says what it answered."""


@dataclass(frozen=True, slots=True)
class PrefillSample:
    """One prompt on an idle engine: tokens that were computed (not cached), and time to the first token."""

    prompt_tokens: int
    ttft_ms: float


@dataclass(frozen=True, slots=True)
class DecodeSample:
    """Steps of `streams` sequences of mean context `context_tokens`: the typical time of one."""

    streams: int
    context_tokens: float
    step_ms: float


@dataclass(frozen=True, slots=True)
class Samples:
    """All that was measured of one engine."""

    prefill: tuple[PrefillSample, ...]
    decode: tuple[DecodeSample, ...]


def fit(samples: Samples, *, version: str, source: str, kv_capacity_tokens: int | None = None) -> Coefficients:
    """The non-negative step-time coefficients that fit best, by relative error.

    Prefill of T tokens from nothing is ``base + per_token·T + per_pair·T²/2``; a decode step of B sequences of mean
    context ctx is ``base + per_seq·B + per_seq_token·B·ctx`` (the equations of `Coefficients`, with `host_ms` and
    `first_token_overhead_ms` 0: what a client can time holds them in the bases). Noise on a busy machine only ever
    adds, so of samples of one kind the quickest counts.

    Raises ValueError where a kind of sample is missing.
    """
    prefill = _quickest(samples.prefill, lambda s: round(s.prompt_tokens, -1), lambda s: s.ttft_ms)
    decode = _quickest(samples.decode, lambda s: (s.streams, round(s.context_tokens, -1)), lambda s: s.step_ms)
    if not prefill or not decode:
        raise ValueError("at least one prefill and one decode sample are needed")
    base, per_token, per_pair = fit_non_negative(
        [(1.0, s.prompt_tokens, s.prompt_tokens**2 / 2) for s in prefill], [s.ttft_ms for s in prefill]
    )
    decode_base, per_seq, per_seq_token = fit_non_negative(
        [(1.0, s.streams, s.streams * s.context_tokens) for s in decode], [s.step_ms for s in decode]
    )
    return Coefficients(
        version=version,
        source=source,
        prefill_base_ms=base,
        prefill_ms_per_token=per_token,
        prefill_ms_per_pair=per_pair,
        decode_base_ms=decode_base,
        decode_ms_per_seq=per_seq,
        decode_ms_per_seq_token=per_seq_token,
        kv_capacity_tokens=kv_capacity_tokens,
    )


Sample = TypeVar("Sample", PrefillSample, DecodeSample)


def _quickest(
    samples: Iterable[Sample], kind: Callable[[Sample], object], ms: Callable[[Sample], float]
) -> list[Sample]:
    """The quickest sample of each kind."""
    best: dict[object, Sample] = {}
    for sample in sorted(samples, key=ms):
        best.setdefault(kind(sample), sample)
    return list(best.values())


def fit_non_negative(rows: Sequence[Sequence[float]], targets: Sequence[float]) -> tuple[float, ...]:
    """Least squares with coefficients >= 0, each row weighed by 1/target; tries every set of columns, so few of them.

    Raises ValueError on a target that is not a positive number.
    """
    if not all(0 < target < math.inf for target in targets):
        raise ValueError("times must be positive")
    scaled = np.asarray(rows, dtype=float) / np.asarray(targets, dtype=float)[:, None]
    columns = scaled.shape[1]
    best_error, best = math.inf, np.zeros(columns)
    for size in range(1, columns + 1):
        for chosen in map(list, itertools.combinations(range(columns), size)):
            part = scaled[:, chosen]
            reach = np.linalg.norm(part, axis=0)        # columns differ by orders of magnitude: solve for like sizes
            solution = np.linalg.lstsq(part / reach, np.ones(len(targets)), rcond=None)[0] / reach
            error = float(np.sum((part @ solution - 1.0) ** 2))
            if solution.min() >= 0 and error < best_error - 1e-9:      # of equals the one with fewer terms
                best_error, best = error, np.zeros(columns)
                best[chosen] = solution
    return tuple(float(value) for value in best)


@dataclass(frozen=True, slots=True)
class _Timeline:
    """One stream as the client saw it; times in seconds on one clock."""

    sent_at_s: float
    token_at_s: tuple[float, ...]
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int

    @property
    def mean_context_tokens(self) -> float:
        return self.prompt_tokens + self.output_tokens / 2


def no_progress(done: int, total: int) -> None:
    """For callers without an audience."""


async def measure(
    url: str, model: str, slots: int, *, rng: random.Random, progress: Callable[[int, int], None] = no_progress
) -> Samples:
    """Runs the plan against an engine that nobody else uses. `progress(done, total)` counts steps of the first round.

    Raises CalibrationError where the engine does not answer as it should.
    """
    prefill: list[PrefillSample] = []
    decode: list[DecodeSample] = []
    total = len(PROMPT_WORDS) + 2
    try:
        async with httpx.AsyncClient(base_url=url, timeout=REQUEST_TIMEOUT_S, trust_env=False) as client:
            await _stream(client, model, _prompt(8, rng), 4)        # warms buffers and thread pools; not counted
            progress(1, total)
            started_at_s = time.monotonic()
            for round_number in range(1, MAX_ROUNDS + 1):
                for done, words in enumerate(PROMPT_WORDS, start=2):
                    timeline = await _stream(client, model, _prompt(words, rng), SINGLE_OUTPUT_TOKENS)
                    ttft_ms = (timeline.token_at_s[0] - timeline.sent_at_s) * 1e3
                    prefill.append(PrefillSample(timeline.prompt_tokens - timeline.cached_tokens, ttft_ms))
                    decode.append(_decode_sample([timeline]))
                    progress(min(done, total), total)
                if slots > 1:
                    decode.append(_decode_sample(await asyncio.gather(*(
                        _stream(client, model, _prompt(BATCH_PROMPT_WORDS, rng), BATCH_OUTPUT_TOKENS)
                        for _ in range(slots)
                    ))))
                progress(total, total)
                spent_s = time.monotonic() - started_at_s
                if spent_s * (round_number + 1) / round_number > ENGINE_TIME_S:
                    break
    except (httpx.HTTPError, ValueError, KeyError) as error:
        raise CalibrationError(f"{model} at {url} could not be measured: {error!r}") from error
    return Samples(tuple(prefill), tuple(decode))


def _prompt(words: int, rng: random.Random) -> str:
    """Text of about this many tokens that shares no beginning with another: it starts with a number of its own."""
    return " ".join([str(rng.randrange(10**6, 10**7)), *rng.choices(_WORDS, k=words)])


async def _stream(client: httpx.AsyncClient, model: str, prompt: str, output_tokens: int) -> _Timeline:
    body = {
        "model": model, "prompt": prompt, "max_tokens": output_tokens, "temperature": 0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True},
    }
    arrivals: list[float] = []
    usage = None
    sent_at_s = time.monotonic()
    # llama.cpp closes the connection after each streamed answer and does not announce it, so it must not be used again.
    async with client.stream("POST", "/v1/completions", json=body, headers={"connection": "close"}) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if usage := chunk.get("usage") or usage:
                continue
            if any(choice.get("text") for choice in chunk["choices"]):
                arrivals.append(time.monotonic())
    if usage is None or len(arrivals) < 2:
        raise ValueError(f"a stream of {len(arrivals)} chunks, with usage {usage}")
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return _Timeline(sent_at_s, tuple(arrivals), usage["prompt_tokens"], cached, usage["completion_tokens"])


def _decode_sample(together: Sequence[_Timeline]) -> DecodeSample:
    """The typical gap between tokens while all streams decode: from the last first token to the first last one."""
    from_s = max(timeline.token_at_s[0] for timeline in together)
    to_s = min(timeline.token_at_s[-1] for timeline in together)
    gaps_s = [
        later - earlier
        for timeline in together
        for earlier, later in itertools.pairwise(timeline.token_at_s)
        if earlier >= from_s and later <= to_s
    ]
    if not gaps_s:
        raise ValueError(f"{len(together)} streams did not overlap")
    context_tokens = statistics.fmean(timeline.mean_context_tokens for timeline in together)
    return DecodeSample(len(together), context_tokens, statistics.median(gaps_s) * 1e3)


def engine_key(*, gguf_sha256: str, threads: int, slots: int, context_tokens: int, library_version: str) -> str:
    """What a measurement holds for: change any of these, or the processor, and it must be made anew."""
    parts = [PLAN, gguf_sha256, threads, slots, context_tokens, library_version, os.cpu_count(), _processor()]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _processor() -> str:
    """The processor's own name where the kernel tells it, else the architecture."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def load(path: Path) -> Coefficients | None:
    """Coefficients that were measured before; `None` where there are none, or they do not make sense."""
    try:
        fields = json.loads(path.read_bytes())["coefficients"]
        coefficients = Coefficients(**fields)
        figures = [value for value in asdict(coefficients).values() if isinstance(value, int | float)]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return coefficients if all(0 <= figure < math.inf for figure in figures) else None


def save(path: Path, coefficients: Coefficients, samples: Samples) -> None:
    """Writes coefficients with the samples they come from. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text(json.dumps({"coefficients": asdict(coefficients), "samples": asdict(samples)}, indent=1))
    part.replace(path)


def name_version(day: datetime.date, samples: Samples) -> str:
    """A name for a measurement: its day, and four hex digits that tell two of one day apart."""
    return f"{day.isoformat()}/{hashlib.sha256(repr(samples).encode()).hexdigest()[:4]}"
