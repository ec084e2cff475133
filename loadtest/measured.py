"""From the records of a run to the numbers that are judged. Pure.

Percentiles are by nearest rank: the P99 of fewer than 100 values is the largest, so a short run cannot hide its worst.
A number that the records cannot give is absent, and `verdict` fails a threshold whose number is absent.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from backends.catalog.spec import Coefficients
from loadtest.fake_engine.step import step_ms
from loadtest.openai_stream import StreamRecord

CHUNK_TOKENS = 2048


def unloaded_ttft_s(card: Coefficients, prompt_tokens: int) -> float:
    """What a card needs for a prompt that it has to itself: prefill in chunks of 2,048 tokens, plus its overhead."""
    total_ms = card.first_token_overhead_ms
    for done in range(0, prompt_tokens, CHUNK_TOKENS):
        chunk = min(CHUNK_TOKENS, prompt_tokens - done)
        total_ms += step_ms(card, chunk, chunk * done + chunk * chunk / 2, 0, 0)
    return total_ms / 1000


def unloaded_inter_token_s(card: Coefficients, context_tokens: int) -> float:
    """One decode step of a card for a single sequence with that context."""
    return step_ms(card, 0, 0.0, 1, context_tokens) / 1000


@dataclass(frozen=True, slots=True)
class Promise:
    """What a latency class of the run's fleet file promises, in seconds; `None` where nothing is promised."""

    ttft_s: float | None = None
    inter_token_s: float | None = None
    e2e_s: float | None = None

    def kept_by(self, record: StreamRecord) -> bool:
        """Whether this request came whole and within the promise (its mean gap against the inter-token promise)."""
        if record.failure or record.ttft_s is None:
            return False
        mean_gap_s = sum(record.gaps_s) / len(record.gaps_s) if record.gaps_s else 0.0
        promised = ((self.ttft_s, record.ttft_s), (self.inter_token_s, mean_gap_s), (self.e2e_s, record.e2e_s))
        return all(budget is None or value <= budget for budget, value in promised)


def percentile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that at least `share` (0 to 1] of all values do not exceed; `None` for no values."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def measure(
    records: Sequence[StreamRecord], *, planned: int, duration_s: float, backends: Collection[str] = (),
    cards: Mapping[str, Coefficients] | None = None, classes: Mapping[str, Promise] | None = None,
) -> dict[str, float]:
    """The numbers of one run, by the names that `thresholds.yaml` uses.

    `planned` is how many requests the schedule held within `duration_s`, `backends` who should have served, `cards`
    the physics behind them (by backend name) where they are simulated.
    """
    whole = [record for record in records if record.failure is None]
    served_by = Counter(record.backend for record in whole)
    numbers: dict[str, float | None] = {
        "requests": len(records),
        "requests_per_s": len(records) / duration_s,
        "failed_requests": len(records) - len(whole),
        "unfinished_requests": planned - len(records),
        "lost_tokens": sum(record.lost_tokens for record in records),
        "tokens_per_s": sum(record.tokens for record in records) / duration_s,
    }
    if backends:
        numbers["unused_backends"] = sum(1 for name in backends if not served_by[name])
    if classes and records:
        kept = sum(classes.get(record.latency_class or "", Promise()).kept_by(record) for record in records)
        numbers["kept_budget_ratio"] = kept / len(records)
    numbers |= _spread("lag", "_s", (record.lag_s for record in records), (0.5, 0.99))
    numbers |= _spread("ttft", "_s", (record.ttft_s for record in records))
    numbers |= _spread("e2e", "_s", (record.e2e_s for record in records))
    numbers |= _spread("inter_token", "_s", (gap for record in records for gap in record.gaps_s))
    # One frozen stream in fifty vanishes among its tokens: a freeze is one long gap of thousands. Per request it shows.
    numbers |= _spread("worst_gap", "_s", (max(record.gaps_s) for record in records if record.gaps_s))
    numbers |= _spread("overhead", "_ms", (record.overhead_ms for record in records))
    if cards:
        numbers |= _spread("ttft_over_card", "", _over(whole, cards, _ttft_ratio))
        numbers |= _spread("inter_token_over_card", "", _over(whole, cards, _gap_ratio))
    return {name: float(value) for name, value in numbers.items() if value is not None}


def shares(records: Sequence[StreamRecord]) -> dict[str, float]:
    """The share of whole requests that each backend served, by name."""
    served_by = Counter(record.backend or "(unnamed)" for record in records if record.failure is None)
    return {name: count / served_by.total() for name, count in sorted(served_by.items())}


def failures(records: Sequence[StreamRecord]) -> dict[str, int]:
    """How often each kind of failure came, most frequent first."""
    return dict(Counter(record.failure for record in records if record.failure).most_common())


def _spread(
    name: str, unit: str, values: Iterable[float | None], points: Sequence[float] = (0.5, 0.95, 0.99)
) -> dict[str, float | None]:
    known = [value for value in values if value is not None]
    return {f"{name}_p{round(point * 100)}{unit}": percentile(known, point) for point in points}


def _over(
    records: Sequence[StreamRecord], cards: Mapping[str, Coefficients],
    ratio: Callable[[StreamRecord, Coefficients], float | None],
) -> Iterable[float | None]:
    return (ratio(record, cards[record.backend]) for record in records if record.backend and record.backend in cards)


def _ttft_ratio(record: StreamRecord, card: Coefficients) -> float | None:
    return record.ttft_s / unloaded_ttft_s(card, record.prompt_tokens) if record.ttft_s is not None else None


def _gap_ratio(record: StreamRecord, card: Coefficients) -> float | None:
    """Mean gap over the card's own, so that events read together and apart count alike."""
    if not record.gaps_s:
        return None
    mean_gap_s = sum(record.gaps_s) / len(record.gaps_s)
    return mean_gap_s / unloaded_inter_token_s(card, record.prompt_tokens + record.tokens // 2)
