"""``python -m loadtest.sim.bound SCENARIO``: one trace, one policy, the bound, and what hindsight makes of both.

Prints a JSON object a seed on standard output: the policy's figures, the certified bound at its number of requests in
budget and at 99 %, the shadow prices of the fluid reference, and the point that local search reaches from the policy's
own assignment.
"""

import argparse
import json
import sys

from loadtest.sim.bound.comparison import compare
from loadtest.sim.bound.hindsight import HindsightPoint
from loadtest.sim.bound.ratios import Trace
from loadtest.sim.pools import find_pool
from loadtest.sim.run import parse_seeds
from loadtest.sim.scenarios import SECONDS, find_scenarios


def main() -> None:
    """Reads the command line, prints."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.sim.bound", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("scenario")
    parser.add_argument("--pool", default="site")
    parser.add_argument("--policy", default="headrace")
    parser.add_argument("--seeds", default="1")
    parser.add_argument("--rate", type=float, help="requests a second instead of the usual")
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--evaluations", type=int, default=0, help="rounds of the hindsight search")
    options = parser.parse_args()
    (scenario,) = find_scenarios(options.scenario)
    rate_per_s = options.rate or scenario.rate_per_s * find_pool(options.pool).scale
    for seed in parse_seeds(options.seeds):
        trace = Trace(scenario.name, options.pool, seed, rate_per_s, options.seconds)
        print(json.dumps(compare(trace, options.policy, options.evaluations, _say)), flush=True)


def _say(point: HindsightPoint) -> None:
    print(f"\rround {point.evaluations}: {point.good_requests} in budget, cost {point.cost:.4f}", end="",
          file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
