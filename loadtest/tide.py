"""`python -m loadtest.tide`: traffic that comes in waves, one JSON line for each request that has ended.

The rate goes from its trough to its peak and back once a period, as a squared cosine, for nights are long: half of the
time it is in the lowest quarter of its range::

    rate(t) = trough + (peak - trough) · ((1 - cos(2π·(t / period + begin))) / 2)²

Arrivals are a Poisson stream of that rate (thinned from one of the peak's), from a seed. `--even` spaces them out
instead, one whenever the rate adds up to the next whole number: for waves of so few requests that chance would be most
of what is seen.

Each request is streamed and checked to its last token (`openai_stream`). Threads do the waiting: for the tens of
requests a second that one laptop serves, they are enough.
"""

import argparse
import json
import math
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from random import Random

from loadtest.openai_stream import Ask, Endpoint, Patience, StreamRecord, stream_chat
from loadtest.traffic import Lengths, prompt_text

MOST_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class Wave:
    """Requests per second over time."""

    trough_per_s: float
    peak_per_s: float
    period_s: float
    begins_at: float = 0.0
    """As a share of the period: 0 in the trough, 0.5 at the peak."""

    def rate_per_s(self, at_s: float) -> float:
        day = (1.0 - math.cos(2.0 * math.pi * (at_s / self.period_s + self.begins_at))) / 2.0
        return self.trough_per_s + (self.peak_per_s - self.trough_per_s) * day**2

    def due(self, until_s: float) -> float:
        """Requests that the rate adds up to by then."""
        began = 2.0 * math.pi * self.begins_at
        turns = 2.0 * math.pi * until_s / self.period_s
        days_s = (_squares(began + turns) - _squares(began)) * self.period_s / (2.0 * math.pi)
        return self.trough_per_s * until_s + (self.peak_per_s - self.trough_per_s) * days_s

    def even_arrivals(self, duration_s: float) -> Iterator[float]:
        """Seconds at which `due` reaches the next whole number."""
        for count in range(1, math.floor(self.due(duration_s)) + 1):
            low_s, high_s = 0.0, duration_s
            for _ in range(60):
                middle_s = (low_s + high_s) / 2.0
                low_s, high_s = (middle_s, high_s) if self.due(middle_s) < count else (low_s, middle_s)
            yield high_s

    def arrivals(self, rng: Random, duration_s: float) -> Iterator[float]:
        """Seconds after the beginning at which requests come. Raises `ValueError` for rates that are none."""
        if not 0.0 <= self.trough_per_s <= self.peak_per_s or not self.peak_per_s > 0.0 or not self.period_s > 0.0:
            raise ValueError("the trough must not be negative, the peak not below it and above 0, the period above 0")
        at_s = rng.expovariate(self.peak_per_s)
        while at_s < duration_s:
            if rng.random() * self.peak_per_s < self.rate_per_s(at_s):
                yield at_s
            at_s += rng.expovariate(self.peak_per_s)


def _squares(angle: float) -> float:
    """The integral of `((1 - cos x) / 2)²` from 0; the square is `3/8 - cos(x)/2 + cos(2x)/8`."""
    return 3.0 * angle / 8.0 - math.sin(angle) / 2.0 + math.sin(2.0 * angle) / 16.0


def main(arguments: list[str] | None = None) -> int:
    """Send it all, then return 0; what failed is in the lines."""
    given = _parse(arguments)
    wave = Wave(given.trough, given.peak, given.period, given.begin)
    rng = Random(given.seed)
    prompts = Lengths(given.prompt_tokens, 0.4, 4 * given.prompt_tokens)
    outputs = Lengths(given.output_tokens, 0.4, 4 * given.output_tokens)
    endpoint, writing = Endpoint.parse(given.url), threading.Lock()
    began_s = time.monotonic()

    def send(ask: Ask) -> None:
        line = json.dumps(line_of(stream_chat(endpoint, ask, patience=Patience(first_token_s=60.0)), began_s))
        with writing:
            sys.stdout.write(line + "\n")
            sys.stdout.flush()

    with ThreadPoolExecutor(MOST_AT_ONCE) as pool:
        for at_s in wave.even_arrivals(given.duration) if given.even else wave.arrivals(rng, given.duration):
            tokens = prompts.draw(rng)
            ask = Ask(began_s + at_s, given.model, prompt_text(tokens, rng), tokens, outputs.draw(rng))
            time.sleep(max(0.0, ask.intended_at_s - time.monotonic()))
            pool.submit(send, ask)
    return 0


def line_of(record: StreamRecord, began_s: float) -> dict[str, object]:
    """What is told of a request. `pace_s`: mean time per token after the first; `clock_s`: when it was due, on the
    machine's monotonic clock."""
    pace_s = None
    if record.ttft_s is not None and record.tokens > 1:
        pace_s = (record.e2e_s - record.ttft_s) / (record.tokens - 1)
    return {"at_s": round(record.intended_at_s - began_s, 3), "clock_s": record.intended_at_s,
            "lag_s": round(record.lag_s, 4), "backend": record.backend, "status": record.status,
            "ttft_s": record.ttft_s, "pace_s": pace_s, "e2e_s": record.e2e_s, "tokens": record.tokens,
            "failure": record.failure, "detail": record.detail}


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m loadtest.tide", description="Traffic in waves.")
    parser.add_argument("--url", required=True, help="gateway, such as http://127.0.0.1:8080")
    parser.add_argument("--model", required=True)
    parser.add_argument("--trough", type=float, required=True, help="requests per second where it is least")
    parser.add_argument("--peak", type=float, required=True, help="and where it is most")
    parser.add_argument("--period", type=float, default=60.0, help="seconds from trough to trough")
    parser.add_argument("--begin", type=float, default=0.0, help="share of the period to begin at; 0 is the trough")
    parser.add_argument("--duration", type=float, default=120.0, help="seconds")
    parser.add_argument("--prompt-tokens", type=int, default=120, help="median")
    parser.add_argument("--output-tokens", type=int, default=48, help="median")
    parser.add_argument("--even", action="store_true", help="evenly spaced instead of a Poisson stream")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
