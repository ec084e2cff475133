"""What an inference pool carries, and how many requests come late at a load: a stand-in for simulating each of them.

The machine time that one request takes on a card whose streams must keep `B` between tokens, with `P` prompt and `D`
output tokens and the step's coefficients (`backends.catalog`: base `a`, `b` a prompt token, `q` a pair, `d` a decoding
stream, `e` a token of its context)::

    W(B) = (b·P + q·P²/2 + d·D + e·(P·D + D²/2)) / (1 - a/B)           capacity = 1 / mean of W over the traffic

The rate at which the steps of a full card would just keep the budget on average. Lateness begins before that, sooner in
a small pool than in a large one; the share of requests out of budget, over `(1 - load) · √replicas` as in square-root
staffing (Halfin and Whitt 1981), lies on one curve for pools of 10 to 40 replicas. `MISSES` is that curve, measured by
the request-level simulator with the shipped policy (`validation` measures it again and says how far off it is).

Beyond the highest load that was measured, what is over it is refused, and so a miss.
"""

from bisect import bisect_left
from functools import cache
from math import exp, log, sqrt
from random import Random
from statistics import mean

from loadtest.sim.classes import STANDARD, draw_sizes
from loadtest.sim.lending.cluster import SERVING_NODES, replicas
from loadtest.sim.pools import SimBackend, find_pool

POOL = "fitted-owned"
DRAWS = 4_000
MISS_TARGET = 0.01
MISSES = ((-0.63, 0.13), (0.0, 0.09), (0.316, 0.054), (0.63, 0.017), (0.95, 0.0085), (1.26, 0.003), (1.6, 0.0018),
          (2.2, 0.0015))
"""(1 - load) · √replicas → share of requests out of budget; between points by straight lines in the logarithm."""
LOAD_MEASURED = 1.1


def replica_of(card: str) -> SimBackend:
    """The engine of one replica on this card."""
    return next(backend for backend in find_pool(POOL).backends if backend.family == card)


@cache
def capacity_per_s(card: str) -> float:
    """Requests a second of one replica, by the formula above over the usual classes."""
    coefficients, rng = replica_of(card).coefficients, Random(0)
    base_ms = coefficients.host_ms + coefficients.decode_base_ms
    total_s = 0.0
    for each in STANDARD:
        budget_s = each.budget.inter_token_s
        assert budget_s is not None, "every usual class promises a time between tokens"
        kept = 1.0 - base_ms / (1000.0 * budget_s)
        sizes = [draw_sizes(each, rng) for _ in range(DRAWS)]
        machine_ms = mean(_machine_ms(replica_of(card), prompt, output) for prompt, output in sizes)
        total_s += each.share * machine_ms / kept / 1000.0
    return 1.0 / total_s


def _machine_ms(replica: SimBackend, prompt: int, output: int) -> float:
    c = replica.coefficients
    return (c.prefill_ms_per_token * prompt + c.prefill_ms_per_pair * prompt * prompt / 2
            + c.decode_ms_per_seq * output + c.decode_ms_per_seq_token * (prompt * output + output * output / 2))


def pool_capacity_per_s(serving: dict[str, int]) -> float:
    """Of so many replicas by card."""
    return sum(count * capacity_per_s(card) for card, count in serving.items())


def whole_pool() -> dict[str, int]:
    """Replicas by card when nothing is lent."""
    return {card: replicas(card) for card in SERVING_NODES}


def miss_share(load: float, serving: int) -> float:
    """Share of requests out of budget at a load (1: the capacity) of so many replicas."""
    if serving <= 0:
        return 1.0
    within = min(load, LOAD_MEASURED)
    curve = _curve((1.0 - within) * sqrt(serving))
    return 1.0 - (1.0 - curve) * within / load if load > within else curve


def _curve(slack: float) -> float:
    xs = [x for x, _ in MISSES]
    place = min(max(1, bisect_left(xs, slack)), len(xs) - 1)
    (x0, y0), (x1, y1) = MISSES[place - 1], MISSES[place]
    share = min(1.0, max(0.0, (slack - x0) / (x1 - x0)))
    return exp(log(y0) + share * (log(y1) - log(y0)))


@cache
def slack_needed() -> float:
    """`(1 - load) · √replicas` at which as many requests miss as may."""
    low, high = MISSES[0][0], MISSES[-1][0]
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _curve(middle) > MISS_TARGET else (low, middle)
    return high


def share_of_pool_needed(per_s: float) -> float:
    """The share of the whole pool, all cards alike, that keeps the budget at this demand; over 1 where it is too small.

    `load · n·C = demand` with `load = 1 - slack/√n` solved for `n`, `C` being the mean capacity of a replica.
    """
    count, each_per_s = _replica_on_average()
    root = (slack_needed() + sqrt(slack_needed() ** 2 + 4.0 * per_s / each_per_s)) / 2.0
    return root * root / count


@cache
def _replica_on_average() -> tuple[int, float]:
    whole = whole_pool()
    return sum(whole.values()), pool_capacity_per_s(whole) / sum(whole.values())


def peak_per_s() -> float:
    """The demand for which the whole pool is just large enough."""
    low, high = 0.0, pool_capacity_per_s(whole_pool())
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if share_of_pool_needed(middle) <= 1.0 else (low, middle)
    return low
