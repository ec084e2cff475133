"""The claims, as data.

Figures of the plan (`T1` to `T6` are its tables) come from another simulator of the same cards, classes and arrivals:
they are goals, and what the same runs say of the peers stands beside each. `goal` marks figures that were set as aims.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from loadtest.sim.scorecard.carrying import Carries
from loadtest.sim.scorecard.cases import LISTED, OWNED, PEERS, PREDICTING, RULE, SITE, TUNED, Case, case
from loadtest.sim.scorecard.claims import Claim
from loadtest.sim.scorecard.costs import Cheaper, OverBound
from loadtest.sim.scorecard.coverage import Covered, CoveredEachAlone, Recovered
from loadtest.sim.scorecard.decisions import Decides
from loadtest.sim.scorecard.faults import Noticed, OrderlyWhenHopeless, Undamaged
from loadtest.sim.scorecard.shares import AsMuchAs, Kept, NotUndercut, Unbeaten

GOAL = "goal"
PLAN: tuple[tuple[Case, float, str], ...] = (
    (case("steady"), 0.995, "plan T1"),
    (case("burst"), 0.992, "plan T1"),
    (case("burst", SITE, 9.0), 0.966, "plan T1"),
    (case("mixed-budgets"), 0.998, "plan T1"),
    (case("long-context"), 0.983, "plan T1"),
    (case("flash-crowd"), 0.992, "plan T2"),
    (case("degrades-silently"), 0.996, "plan T2"),
    (case("dies"), 0.986, "plan T2"),
    (case("coefficient-drift"), 0.996, "plan T2"),
    (case("card-lent"), 0.991, "plan T2"),
    (case("several-gateways"), 0.987, "plan T2"),
    (case("misspecified"), 0.977, "plan T2"),
    (case("prefix-heavy"), 0.983, "plan T3"),
    (case("prefix-heavy", SITE, 2.2), 0.963, "plan T3"),
    (case("burst", OWNED), 0.982, "plan T4"),
    (case("mixed-budgets", OWNED), 0.997, "plan T4"),
    (case("degrades-silently", OWNED), 0.988, "plan T4"),
    (case("flash-crowd", OWNED), 0.981, "plan T4"),
    (case("azure-replay-0.3", OWNED), 0.979, "plan T4"),
    (case("azure-replay-0.5", OWNED), 0.960, "plan T4"),
    (case("azure-replay-0.7", OWNED), 0.928, "plan T4"),
    (case("burst", LISTED), 0.980, "plan T5"),
    (case("mixed-budgets", LISTED), 0.995, "plan T5"),
    (case("degrades-silently", LISTED), 0.985, "plan T5"),
    (case("flash-crowd", LISTED), 0.982, "plan T5"),
    (case("azure-replay-0.3"), 0.992, "plan T6"),
    (case("azure-replay-0.5"), 0.973, "plan T6"),
    (case("azure-replay-0.7"), 0.962, "plan T6"),
)
HIGHER: tuple[tuple[Case, float], ...] = (
    (case("burst", SITE, 9.0), 0.97), (case("azure-replay-0.5", OWNED), 0.97), (case("misspecified"), 0.98),
)
OVER_BOUND: tuple[tuple[Case, float, int], ...] = (
    (case("steady"), 1.20, 400), (case("burst"), 1.20, 400), (case("burst", SITE, 9.0), 1.25, 0),
    (case("azure-replay-0.3"), 1.12, 0), (case("azure-replay-0.5"), 1.12, 400), (case("azure-replay-0.7"), 1.12, 0),
    (case("burst", OWNED), 1.20, 0), (case("azure-replay-0.3", OWNED), 1.12, 0),
    (case("azure-replay-0.5", OWNED), 1.12, 0), (case("azure-replay-0.7", OWNED), 1.12, 0),
    (case("burst", LISTED), 1.20, 0),
)
LEAST_SAVED = {SITE: 0.12, OWNED: 0.12, LISTED: 0.03}
"""By pool: of owned machines the older are cheap, of a cloud's list prices hardly."""
DEFECT_BUDGETS = 9.6
"""P99 of first tokens at 9/s with nothing shed, where the hopeless all go to the cheapest machine (plan §2.5)."""
DEGRADING = ((case("degrades-silently"), case("burst", SITE, 5.0)),
             (case("degrades-silently", OWNED), case("burst", OWNED, 5.0)))
"""With the same arrivals without the fault."""
DECISIONS = ((8, 40.0, False), (64, 150.0, False), (1000, 400.0, True))
QUICK_PEERS = ("weighted_least_request", "shortest_expected_delay")


@dataclass(frozen=True, slots=True)
class Section:
    """Claims of one kind; `name` chooses them on the command line."""

    name: str
    title: str
    claims: tuple[Claim, ...]


def sections(peers: Sequence[str] = PEERS, tuned: Sequence[str] = TUNED) -> tuple[Section, ...]:
    """All claims against these peers."""
    rivals, tuned_ones = tuple(peers), tuple(tuned)
    cases = tuple(one for one, _, _ in PLAN)
    predicting = tuple(peer for peer in PREDICTING if peer in rivals)
    least = tuple(peer for peer in ("weighted_least_request",) if peer in rivals)
    return (
        Section("share", "In budget, at least as the plan says", (
            *(Kept(one, share, source, rivals) for one, share, source in PLAN),
            *(Kept(one, share, GOAL, rivals) for one, share in HIGHER))),
        Section("rule", "In budget, at least as the plan's rule has in the same runs", tuple(
            AsMuchAs(one, share, source, (RULE,)) for one, share, source in PLAN)),
        Section("peers", "No peer is better", tuple(
            claim for who, them in (("peers", rivals), ("margins set by hand", tuned_ones)) if them
            for claim in (Unbeaten(who, cases, them, GOAL), NotUndercut(who, cases, them, GOAL)))),
        Section("capacity", "More load with 99 of 100 in budget", tuple(
            Carries("burst", pool, who, over, ratio, GOAL)
            for pool in (SITE, OWNED)
            for who, over, ratio in (("the best latency-predicting peer", predicting, 1.3),
                                     ("weighted least request", least, 3.0)) if over)),
        Section("cost", "Cheaper than peers", tuple(
            Cheaper(one, LEAST_SAVED[one.pool], GOAL, rivals) for one in cases)),
        Section("bound", "Near what is possible at all (docs/bound.md)", tuple(
            OverBound(one, most, GOAL, evaluations) for one, most, evaluations in OVER_BOUND)),
        Section("hopeless", "Order among the hopeless", (
            OrderlyWhenHopeless(case("unshed"), DEFECT_BUDGETS / 2, "half the defect of plan §2.5", predicting),)),
        Section("faults", "Silent faults and wrong models", (
            *(Noticed(one, 2.0, GOAL) for one, _ in DEGRADING),
            *(Undamaged(one, twin, 0.003, GOAL) for one, twin in DEGRADING))),
        Section("coverage", "Predicted P99 means P99", (
            Covered(case("steady"), 0.005, GOAL), CoveredEachAlone(case("steady"), 0.005, GOAL),
            Covered(case("steady", OWNED, 6.0), 0.005, GOAL), CoveredEachAlone(case("steady", OWNED, 6.0), 0.005, GOAL),
            Covered(case("misspecified"), 0.01, GOAL), CoveredEachAlone(case("misspecified"), 0.01, GOAL),
            Recovered(case("coefficient-drift"), 120.0, 0.005, GOAL))),
        Section("decisions", "A decision's own time, here and now", tuple(
            Decides(backends, most, p99, GOAL) for backends, most, p99 in DECISIONS)),
    )


def quick_sections(peers: Sequence[str] = QUICK_PEERS) -> tuple[Section, ...]:
    """A claim of each kind, for runs of a minute: it says that the command works, not how good the policy is."""
    rivals = tuple(peers)
    predicting = tuple(peer for peer in PREDICTING if peer in rivals)
    burst = case("burst")
    faulty, sound = DEGRADING[0]
    return (
        Section("share", "In budget", (Kept(burst, 0.97, "for the test", rivals),)),
        Section("rule", "As the plan's rule", (AsMuchAs(burst, 0.97, "for the test", (RULE,)),)),
        Section("peers", "No peer is better", (Unbeaten("peers", (burst,), rivals, GOAL),
                                               NotUndercut("peers", (burst,), rivals, GOAL))),
        Section("capacity", "More load", (Carries("burst", SITE, "predicting peers", predicting, 1.0, "for the test",
                                                  (2.0, 6.0)),)),
        Section("cost", "Cheaper than peers", (Cheaper(burst, 0.12, GOAL, rivals),)),
        Section("bound", "Near what is possible", (OverBound(burst, 1.30, "for the test"),)),
        Section("hopeless", "Order among the hopeless", (
            OrderlyWhenHopeless(case("unshed"), DEFECT_BUDGETS / 2, GOAL, predicting),)),
        Section("faults", "Silent faults", (Noticed(faulty, 2.0, GOAL), Undamaged(faulty, sound, 0.02, GOAL))),
        Section("coverage", "Predicted P99 means P99", (
            Covered(case("steady"), 0.02, "for the test"), CoveredEachAlone(case("steady"), 0.02, "for the test"),
            Recovered(case("coefficient-drift"), 120.0, 0.02, "for the test"))),
        Section("decisions", "A decision's own time", (Decides(8, 40.0, False, GOAL, count=200),)),
    )
