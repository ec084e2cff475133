"""The scenarios by name: what arrives, what befalls the cards, and what each is to show.

A scenario is a function of the pool, a seed, a rate and a length; nothing else, and no policy, enters. Times of events
are shares of the length, so that a short run sees them too.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path

from loadtest.sim.arrivals import Crowd, Rate, Steady, draw_arrivals, modulated
from loadtest.sim.classes import LONG, LONG_CONTEXT, MIXED_BUDGETS, STANDARD, by_name, draw_sizes, shares
from loadtest.sim.pools import Pool
from loadtest.sim.replays import CACHE_SHARE, lay_out_azure, lay_out_diurnal, lay_out_mooncake
from loadtest.sim.sessions import BLOCK_TOKENS, Sessions
from loadtest.sim.workload import EventKind, FleetEvent, Physics, SimRequest, TrafficClass, Workload, dice

SECONDS = 400.0
OVERLOAD_PER_S = 10.5


@dataclass(frozen=True, slots=True)
class Setting:
    """What a scenario is laid out for."""

    pool: Pool
    seed: int
    rate_per_s: float
    seconds: float
    trace_dir: Path | None = None
    """Where whole traces lie; `None`: the extracts that are shipped."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """One scenario; `rate_per_s` is its usual rate on four cards."""

    name: str
    shows: str
    rate_per_s: float
    lay_out: Callable[[Setting], Workload]


class UnknownScenario(LookupError):
    """No such scenario; the message lists what there is."""


def find_scenarios(text: str) -> tuple[Scenario, ...]:
    """Scenarios by names with commas between them, or `all`. Raises `UnknownScenario`."""
    if text == "all":
        return tuple(SCENARIOS.values())
    found: list[Scenario] = []
    for name in filter(None, (part.strip() for part in text.split(","))):
        if name in GROUPS:
            found += [SCENARIOS[member] for member in GROUPS[name]]
            continue
        if name not in SCENARIOS:
            close = get_close_matches(name, SCENARIOS, n=1)
            meant = f"; did you mean {close[0]!r}?" if close else ""
            raise UnknownScenario(f"no scenario {name!r}{meant} (there are {', '.join(SCENARIOS)}, and all)")
        found.append(SCENARIOS[name])
    if not found:
        raise UnknownScenario(f"name a scenario: {', '.join(SCENARIOS)}, or all")
    return tuple(found)


# --- requests ----------------------------------------------------------------------------------------------------


def _drawn(setting: Setting, rate: Rate, classes: tuple[TrafficClass, ...],
           fixed: TrafficClass | None = None) -> tuple[SimRequest, ...]:
    """Arrivals at that rate, each of a class by its share, sizes drawn independently."""
    times = draw_arrivals(rate, setting.seconds, dice(setting.seed, "arrivals"))
    of_class, of_size = dice(setting.seed, "classes"), dice(setting.seed, "sizes")
    weights = shares(classes, fixed)
    requests = []
    for at_s in times:
        (each,) = of_class.choices(classes, weights)
        requests.append(SimRequest(at_s, each.name, *draw_sizes(each, of_size)))
    return tuple(requests)


def _bursts(setting: Setting) -> Rate:
    return modulated(setting.rate_per_s, setting.seconds, dice(setting.seed, "bursts"))


def _standard(setting: Setting, rate: Rate | None = None) -> Workload:
    requests = _drawn(setting, rate or _bursts(setting), STANDARD)
    return Workload(requests, by_name(STANDARD), setting.seconds)


def _steady(setting: Setting) -> Workload:
    return _standard(setting, Steady(setting.rate_per_s))


def _flash_crowd(setting: Setting) -> Workload:
    from_s = 0.5 * setting.seconds
    to_s = from_s + min(40.0, 0.1 * setting.seconds)
    workload = _standard(setting, Crowd(_bursts(setting), from_s, to_s, 2.5))
    return replace(workload, marks={"crowd comes": from_s, "crowd goes": to_s})


def _with_events(setting: Setting, *events: FleetEvent, physics: Physics | None = None) -> Workload:
    workload = _standard(setting)
    marks = {f"{event.family} {event.kind}": event.at_s for event in events}
    return replace(workload, events=tuple(sorted(events)), marks=marks, physics=physics or workload.physics)


def _degrades(setting: Setting) -> Workload:
    t = setting.seconds
    return _with_events(setting, FleetEvent(0.4 * t, EventKind.SLOW, "a100", 2.5),
                        FleetEvent(0.7 * t, EventKind.SLOW, "a100", 1.0))


def _dies(setting: Setting) -> Workload:
    t = setting.seconds
    return _with_events(setting, FleetEvent(0.4 * t, EventKind.DIE, "a100"),
                        FleetEvent(0.65 * t, EventKind.RETURN, "a100"))


def _drift(setting: Setting) -> Workload:
    t = 0.3 * setting.seconds
    return _with_events(setting, FleetEvent(t, EventKind.SLOW, "a100", 1.5),
                        FleetEvent(t, EventKind.SLOW, "910b", 0.65))


def _card_lent(setting: Setting) -> Workload:
    """Two cards are lent; a crowd comes, they are called back as it does, and serve 20 s later."""
    t = setting.seconds
    crowd_s = 0.55 * t
    crowd = Crowd(_bursts(setting), crowd_s, crowd_s + min(40.0, 0.1 * t), 2.5)
    back_s = crowd_s + min(20.0, 0.05 * t)
    events = [FleetEvent(at_s, kind, family) for at_s, kind in ((0.2 * t, EventKind.DRAIN), (back_s, EventKind.RECALL))
              for family in ("l40s", "910b")]
    marks = {"cards lent": 0.2 * t, "crowd comes": crowd_s, "cards back": back_s}
    return replace(_standard(setting, crowd), events=tuple(events), marks=marks)


def _mixed_budgets(setting: Setting) -> Workload:
    return Workload(_drawn(setting, _bursts(setting), MIXED_BUDGETS), by_name(MIXED_BUDGETS), setting.seconds)


def _long_context(setting: Setting) -> Workload:
    return Workload(_drawn(setting, _bursts(setting), LONG_CONTEXT, LONG), by_name(LONG_CONTEXT), setting.seconds)


def _several_gateways(setting: Setting) -> Workload:
    return replace(_standard(setting), gateways=4)


def _misspecified(setting: Setting) -> Workload:
    physics = Physics(told_sigma=0.30, graph_penalty=0.35, prefill_pairs_ms=3e-6, told_chunk_ratio=2.0)
    return replace(_standard(setting), physics=physics)


def _unshed(setting: Setting) -> Workload:
    return replace(_standard(setting), sheddable=False)


def _prefix_heavy(setting: Setting) -> Workload:
    sessions = Sessions(dice(setting.seed, "sessions"))
    of_class, weights = dice(setting.seed, "classes"), shares(STANDARD)
    times = draw_arrivals(_bursts(setting), setting.seconds, dice(setting.seed, "arrivals"))
    requests = [sessions.ask(at_s, of_class.choices(STANDARD, weights)[0]) for at_s in times]
    return Workload(tuple(requests), by_name(STANDARD), setting.seconds,
                    physics=Physics(prefix_cache_share=CACHE_SHARE), prefix_block_tokens=BLOCK_TOKENS)


def _azure(*kinds: str) -> Callable[[Setting], Workload]:
    return lambda setting: lay_out_azure(
        kinds, setting.seed, setting.rate_per_s, setting.seconds, setting.trace_dir)


def _mooncake(setting: Setting) -> Workload:
    return lay_out_mooncake(setting.seed, setting.rate_per_s, setting.seconds, setting.trace_dir)


def _diurnal(setting: Setting) -> Workload:
    return lay_out_diurnal(setting.seed, setting.rate_per_s, setting.seconds, setting.trace_dir)


AZURE_PER_S = 8.03
"""Requests a second in both of Azure's traces together."""

_LIST = (
    Scenario("steady", "cost at an even load", 7.0, _steady),
    Scenario("burst", "budgets kept through bursts, and what that costs", 6.0, _standard),
    Scenario("flash-crowd", "2.5 times the load for 40 s", 4.5, _flash_crowd),
    Scenario("degrades-silently", "the A100 2.5 times slower while its health checks stay green", 5.0, _degrades),
    Scenario("dies", "the A100 killed, and back later", 5.0, _dies),
    Scenario("coefficient-drift", "the A100 1.5 times as slow, the 910B at 0.65 of its time", 5.0, _drift),
    Scenario("mixed-budgets", "promises of 400 ms, 1 s and 10 s beside each other", 4.5, _mixed_budgets),
    Scenario("long-context", "15 % of prompts of 14,000 tokens beside code completion", 2.5, _long_context),
    Scenario("card-lent", "L40S and 910B lent, called back when a crowd comes", 4.0, _card_lent),
    Scenario("several-gateways", "four gateways with news of each other every 200 ms", 6.0, _several_gateways),
    Scenario("overload", "one and a half times what the pool can carry", OVERLOAD_PER_S, _standard),
    Scenario("unshed", "more load than can be in time, and nobody may be turned away", 9.0, _unshed),
    Scenario("misspecified", "engines that do not obey the gateway's formula, and 30 % error in what it is told", 6.0,
             _misspecified),
    Scenario("prefix-heavy", "sessions that come back, and caches that hold a part of them", 1.5, _prefix_heavy),
    Scenario("azure-code", "Azure 2023, code completion: real and very bursty", 1.0, _azure("code")),
    Scenario("azure-conv", "Azure 2023, conversations", 5.5, _azure("conv")),
    *(Scenario(f"azure-replay-{keep}", f"Azure 2023, both, {keep:.0%} of the requests kept",
               round(keep * AZURE_PER_S, 2), _azure("conv", "code")) for keep in (0.3, 0.5, 0.7)),
    Scenario("mooncake", "Mooncake's conversations: long prompts that share beginnings", 0.8, _mooncake),
    Scenario("diurnal", "a day of ServeGen's clients, pressed into the run", 8.0, _diurnal),
)
GROUPS: Mapping[str, tuple[str, ...]] = {
    "azure-replay": tuple(f"azure-replay-{keep}" for keep in (0.3, 0.5, 0.7)),
}
SCENARIOS: Mapping[str, Scenario] = {scenario.name: scenario for scenario in _LIST}
