"""What the claims are about: scenarios on pools at rates, and who stands beside the policy."""

from typing import NamedTuple

from loadtest.sim.pools import find_pool
from loadtest.sim.scenarios import SCENARIOS
from policies.baselines.roster import PRESETS

SITE, OWNED, LISTED = "site", "fitted-owned", "fitted-list"

PEERS = tuple(preset.name for preset in PRESETS)
"""Every balancer of others."""
TUNED = ("cheapest_feasible:margin=1.5", "cheapest_feasible:margin=2.0")
"""The plain form of our own idea, its margin chosen by hand."""
RULE = "bounded_miss"
"""The rule that the plan's figures were measured with, lent our beliefs."""
PREDICTING = ("shortest_expected_delay", "llmd_headroom_most", "polyserve")
"""Those that choose by a latency that they predict, lent our prediction."""


class Case(NamedTuple):
    """One scenario on one pool."""

    scenario: str
    pool: str
    rate_per_s: float

    def __str__(self) -> str:
        return f"{self.scenario} {self.rate_per_s:g}/s, {self.pool}"


def case(scenario: str, pool: str = SITE, rate_per_s: float | None = None) -> Case:
    """At the scenario's usual rate where none is given."""
    usual = SCENARIOS[scenario].rate_per_s * find_pool(pool).scale
    return Case(scenario, pool, usual if rate_per_s is None else rate_per_s)
