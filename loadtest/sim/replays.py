"""Real traces as workloads: windows of them, thinned or laid over each other to the rate that is asked for.

Seeds 1 to 5 take five windows that lie evenly over the trace, other seeds one that begins at random; a window that
reaches the end goes on at the beginning. The share of requests kept is the rate over the trace's own. Where more is
asked for than the trace has, windows of other places are laid on top. Real burstiness survives all of that but the
thinning, which makes a trace a little smoother.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from math import ceil
from pathlib import Path
from random import Random

from loadtest.sim.classes import BULK, CHAT, CODE, LONG, RAG, by_name
from loadtest.sim.traces import (
    MOONCAKE_BLOCK_TOKENS,
    SERVEGEN_STEP_S,
    TraceRow,
    azure_offset_s,
    read_azure,
    read_mooncake,
    read_servegen,
)
from loadtest.sim.workload import Physics, SimRequest, TrafficClass, Workload, dice

WINDOWS = 5
CACHE_SHARE = 0.35
MAX_PROMPT_TOKENS = 64_000
"""Longer prompts are left out: they do not fit the smallest card beside anything else."""
MAX_CV = 4.0
DAY_STEPS = round(86_400 / SERVEGEN_STEP_S)

Tagged = tuple[TraceRow, str]


def azure_rows(kinds: Sequence[str], folder: Path | None) -> list[Tagged]:
    """Rows of `code`, `conv` or both on one clock, with their class."""
    rows: list[Tagged] = []
    offset_s = azure_offset_s(folder) if len(kinds) > 1 else 0.0
    for kind in kinds:
        shift_s = offset_s if kind == "code" else 0.0
        name = CODE.name if kind == "code" else CHAT.name
        rows += [(row._replace(at_s=row.at_s + shift_s), name) for row in read_azure(kind, folder)]
    return sorted(rows, key=lambda pair: pair[0].at_s)


def lay_out_azure(kinds: Sequence[str], seed: int, rate_per_s: float, seconds: float, folder: Path | None) -> Workload:
    """A window of Azure's traces at that mean rate over the whole trace. Raises `TraceMissing`."""
    rows = azure_rows(kinds, folder)
    kept = _windowed(rows, seed, rate_per_s, seconds, lambda row: (row.prompt_tokens, row.output_tokens, row.at_s))
    requests = [SimRequest(at_s, name, row.prompt_tokens, row.output_tokens) for at_s, (row, name), _ in kept]
    classes = [{"code": CODE, "conv": CHAT}[kind] for kind in kinds]
    return Workload(tuple(requests), by_name(tuple(classes)), seconds)


def lay_out_mooncake(seed: int, rate_per_s: float, seconds: float, folder: Path | None) -> Workload:
    """A window of Mooncake's conversations, whole ones kept or left out, so that prefixes stay what they are."""
    rows = [(row, _by_size(row.prompt_tokens).name) for row in read_mooncake(folder)
            if row.prompt_tokens <= MAX_PROMPT_TOKENS]
    kept = _windowed(rows, seed, rate_per_s, seconds, lambda row: row.blocks[:2])
    requests = []
    for at_s, (row, name), copy in kept:
        full = row.prompt_tokens // MOONCAKE_BLOCK_TOKENS
        keys: tuple[object, ...] = row.blocks[:full]
        if copy:  # windows laid on top are other people's conversations
            keys = tuple([(copy, key) for key in row.blocks[:full]])
        session = f"{copy}/{row.blocks[min(1, len(row.blocks) - 1)]}" if row.blocks else None
        requests.append(SimRequest(at_s, name, row.prompt_tokens, row.output_tokens, session, keys))
    return Workload(tuple(requests), by_name((CHAT, RAG, LONG, BULK)), seconds,
                    physics=Physics(prefix_cache_share=CACHE_SHARE), prefix_block_tokens=MOONCAKE_BLOCK_TOKENS)


def lay_out_diurnal(seed: int, rate_per_s: float, seconds: float, folder: Path | None) -> Workload:
    """One day of ServeGen's language clients, pressed into the run's length.

    Each client is a renewal process with gamma gaps of its own coefficient of variation, in a time that runs as fast as
    its rate. Its sizes come from its own distributions; a client of long prompts (mean over 1,200 tokens) is held to
    retrieval's budget, others to chat's.
    """
    clients = read_servegen(folder)
    day = (seed - 1) % max(1, max(len(client.rates_per_s) for client in clients) // DAY_STEPS)
    step_s = seconds / DAY_STEPS
    of_day = [client.rates_per_s[day * DAY_STEPS : (day + 1) * DAY_STEPS] for client in clients]
    total = sum(map(sum, of_day)) / DAY_STEPS
    requests: list[SimRequest] = []
    for client, rates in zip(clients, of_day, strict=True):
        rng = dice(seed, "client", client.name)
        name = RAG.name if _mean(client.prompts) > 1200 else CHAT.name
        scaled = [rate * rate_per_s / total for rate in rates]
        times = _renewals(scaled, step_s, min(MAX_CV, max(1.0, client.cv)), rng)
        requests += [SimRequest(at_s, name, _draw(client.prompts, rng), _draw(client.outputs, rng), tenant=client.name)
                     for at_s in times]
    requests.sort(key=lambda request: request.arrival_s)
    return Workload(tuple(requests), by_name((CHAT, RAG)), seconds)


def _windowed(rows: Sequence[Tagged], seed: int, rate_per_s: float, seconds: float,
              unit: object) -> list[tuple[float, Tagged, int]]:
    """Arrival in the run, row, and which of the windows laid over each other it belongs to.

    `unit` says of a row what is kept or left out together.
    """
    length_s = rows[-1][0].at_s + 1.0
    share = rate_per_s / (len(rows) / length_s)
    copies = ceil(share)
    first_s = (seed - 1) * length_s / WINDOWS if 1 <= seed <= WINDOWS else dice(seed, "window").uniform(0.0, length_s)
    times = [row.at_s for row, _ in rows]
    kept = []
    for copy in range(copies):
        from_s = (first_s + copy * length_s / copies) % length_s
        for at_s, place in _window(times, from_s, seconds, length_s):
            row = rows[place]
            if dice(seed, "keep", copy, unit(row[0])).random() * copies < share:  # type: ignore[operator]
                kept.append((at_s, row, copy))
    kept.sort(key=lambda found: found[0])
    return kept


def _window(times: Sequence[float], from_s: float, seconds: float, length_s: float) -> list[tuple[float, int]]:
    found = []
    began_s = 0.0
    while began_s < seconds:
        until_s = min(length_s, from_s + seconds - began_s)
        places = range(bisect_left(times, from_s), bisect_left(times, until_s))
        found += [(began_s + times[place] - from_s, place) for place in places]
        began_s += until_s - from_s
        from_s = 0.0
    return found


def _by_size(prompt_tokens: int) -> TrafficClass:
    """What a conversation's turn is promised, by how much there is to read."""
    if prompt_tokens <= 2_000:
        return CHAT
    if prompt_tokens <= 8_000:
        return RAG
    return LONG if prompt_tokens <= 32_000 else BULK


def _renewals(rates_per_s: Sequence[float], step_s: float, cv: float, rng: Random) -> list[float]:
    """Arrivals of a process whose gaps are gamma distributed in the integral of its rate."""
    sums = [0.0]
    for rate in rates_per_s:
        sums.append(sums[-1] + rate * step_s)
    shape = 1.0 / (cv * cv)
    times = []
    # The first gap is one under way: begun at a random place of it.
    at = rng.gammavariate(shape, 1.0 / shape) * rng.random()
    while at < sums[-1]:
        step = bisect_right(sums, at) - 1
        times.append((step + (at - sums[step]) / (sums[step + 1] - sums[step])) * step_s)
        at += rng.gammavariate(shape, 1.0 / shape)
    return times


def _mean(lengths: tuple[tuple[int, ...], tuple[float, ...]]) -> float:
    tokens, sums = lengths
    return sum(length * (high - low) for length, low, high in zip(tokens, (0.0, *sums), sums, strict=False))


def _draw(lengths: tuple[tuple[int, ...], tuple[float, ...]], rng: Random) -> int:
    tokens, sums = lengths
    return tokens[min(len(tokens) - 1, bisect_left(sums, rng.random()))]
