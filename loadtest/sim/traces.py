"""Real traces: reading them. The files keep the names and columns of their origins (`extracts/SOURCES.md`).

Extracts ship with Headrace; a folder with the whole files takes their place where one is named.
"""

import csv
import gzip
import json
from collections.abc import Iterator
from datetime import datetime
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

MOONCAKE_BLOCK_TOKENS = 512
SERVEGEN_STEP_S = 600.0


class TraceMissing(Exception):
    """A trace is not where it should be, or is not what it should be; the message says how to get it."""


class TraceRow(NamedTuple):
    """One logged request. `at_s` counts from the first of the trace."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    """Ids of its blocks of `MOONCAKE_BLOCK_TOKENS`, each standing for all up to there."""


class Client(NamedTuple):
    """One client of ServeGen: how often it asks, and for what."""

    name: str
    rates_per_s: tuple[float, ...]
    """Mean rate of each ten minutes, from the start of the first day."""
    cv: float
    """Coefficient of variation of the gaps between its requests, weighted by rate."""
    prompts: tuple[tuple[int, ...], tuple[float, ...]]
    """Lengths in tokens, and their cumulative probabilities."""
    outputs: tuple[tuple[int, ...], tuple[float, ...]]


@lru_cache
def read_azure(kind: str, folder: Path | None) -> tuple[TraceRow, ...]:
    """Azure's LLM inference trace of 2023, `code` or `conv`. Raises `TraceMissing`."""
    name = f"azure_llm_2023_{kind}.csv.gz"
    rows = [(datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp(), int(row["ContextTokens"]),
             int(row["GeneratedTokens"]))
            for row in _csv(name, folder, "TIMESTAMP", "ContextTokens", "GeneratedTokens")]
    began_s = rows[0][0]
    return tuple([TraceRow(at_s - began_s, max(1, prompt), max(1, output)) for at_s, prompt, output in rows])


def azure_offset_s(folder: Path | None) -> float:
    """Seconds by which the code trace begins after the conversation trace."""
    first = [datetime.fromisoformat(next(_csv(f"azure_llm_2023_{kind}.csv.gz", folder, "TIMESTAMP"))["TIMESTAMP"][:26])
             for kind in ("conv", "code")]
    return (first[1] - first[0]).total_seconds()


@lru_cache
def read_mooncake(folder: Path | None) -> tuple[TraceRow, ...]:
    """Mooncake's conversation trace, with its blocks. Raises `TraceMissing`."""
    name = "mooncake_conversation_trace.jsonl.gz"
    rows = []
    try:
        for line in _lines(name, folder):
            row = json.loads(line)
            rows.append(TraceRow(row["timestamp"] / 1000.0, max(1, row["input_length"]), max(1, row["output_length"]),
                                 tuple(row["hash_ids"])))
    except (ValueError, KeyError, TypeError) as error:
        raise TraceMissing(f"{name} is not Mooncake's trace ({error}); {_remedy()}") from None
    return tuple(rows)


@lru_cache
def read_servegen(folder: Path | None) -> tuple[Client, ...]:
    """ServeGen's language clients whose lengths are known, the busiest first. Raises `TraceMissing`."""
    lengths: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for row in _csv("servegen_language_m-mid_top_client_lengths.csv.gz", folder, "client_id", "kind", "len_tokens",
                    "prob"):
        lengths.setdefault((row["client_id"], row["kind"]), []).append((int(row["len_tokens"]), float(row["prob"])))
    rates: dict[str, dict[int, float]] = {}
    spreads: dict[str, list[tuple[float, float]]] = {}
    for row in _csv("servegen_language_m-mid_client_rates.csv.gz", folder, "client_id", "t_s", "rate_rps", "cv"):
        name, rate = row["client_id"], float(row["rate_rps"])
        if (name, "input_tokens") in lengths and (name, "output_tokens") in lengths:
            rates.setdefault(name, {})[int(float(row["t_s"]) / SERVEGEN_STEP_S)] = rate
            if row["cv"]:
                spreads.setdefault(name, []).append((rate, float(row["cv"])))
    clients = [_client(name, by_step, spreads.get(name, []), lengths) for name, by_step in rates.items()]
    return tuple(sorted(clients, key=lambda client: (-sum(client.rates_per_s), client.name)))


def _client(name: str, by_step: dict[int, float], spreads: list[tuple[float, float]],
            lengths: dict[tuple[str, str], list[tuple[int, float]]]) -> Client:
    steps = max(by_step) + 1
    weight = sum(rate for rate, _ in spreads)
    cv = sum(rate * each for rate, each in spreads) / weight if weight else 1.0
    return Client(name, tuple([by_step.get(step, 0.0) for step in range(steps)]), cv,
                  _cumulative(lengths[name, "input_tokens"]), _cumulative(lengths[name, "output_tokens"]))


def _cumulative(given: list[tuple[int, float]]) -> tuple[tuple[int, ...], tuple[float, ...]]:
    total, tokens, sums = 0.0, [], []
    for length, probability in sorted(given):
        total += probability
        tokens.append(max(1, length))
        sums.append(total)
    return tuple(tokens), tuple([value / total for value in sums])


def _csv(name: str, folder: Path | None, *columns: str) -> Iterator[dict[str, str]]:
    reader = csv.DictReader(_lines(name, folder))
    if missing := set(columns) - set(reader.fieldnames or ()):
        raise TraceMissing(f"{name} has no column {', '.join(sorted(missing))}; {_remedy()}")
    yield from reader


def _lines(name: str, folder: Path | None) -> Iterator[str]:
    shipped = files("loadtest.sim").joinpath("extracts")
    source = shipped.joinpath(name) if folder is None else folder / name
    try:
        with source.open("rb") as raw, gzip.open(raw, "rt", encoding="utf-8", newline="") as text:
            yield from text
    except FileNotFoundError:
        where = "" if folder is None else f" in {folder}"
        raise TraceMissing(f"there is no {name}{where}; {_remedy()}") from None
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise TraceMissing(f"{name} cannot be read ({error}); {_remedy()}") from None


def _remedy() -> str:
    return ("leave --trace-dir and HEADRACE_TRACE_DIR out for the extracts that come with Headrace, or get the whole "
            "file as loadtest/sim/extracts/SOURCES.md says")
