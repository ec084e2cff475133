"""Which modules the compiled form is made of: what every request and every decision passes through.

A module belongs here where compiling makes it faster and changes nothing that it does. What stays interpreted although
it is met as often:

* parts of a policy: their settings are dataclass fields beside class variables, which mypyc takes for fields too;
* msgspec's structs and pydantic's models: a compiled class keeps its annotations without their arguments, and a decoder
  that goes by them would read something else;
* what interpreted classes inherit from, and what inherits from a class of uvicorn's.

`tests/unit/test_compiled.py` holds the list against these.
"""

CATALOG = ("backends.catalog.health", "backends.catalog.sample", "backends.catalog.spec", "backends.catalog.views")
BELIEFS = (
    "policies.beliefs.arrivals", "policies.beliefs.backend", "policies.beliefs.caches", "policies.beliefs.classes",
    "policies.beliefs.correction", "policies.beliefs.drift", "policies.beliefs.lengths", "policies.beliefs.observed",
    "policies.beliefs.pool", "policies.beliefs.tails", "policies.beliefs.waiting",
)
DECIDING = (
    "policies.chance", "policies.estimate", "policies.facts", "policies.filters.screens", "policies.footing",
    "policies.hopeless", "policies.learners.ccr.learner", "policies.pickers.least_score",
    "policies.pickers.weighing", "policies.pipeline", "policies.policy", "policies.prices.machine_time",
    "policies.strata",
)
POLICIES = (*CATALOG, *BELIEFS, *DECIDING)
"""All that a decision runs."""
GATEWAY = (
    "backends.upstream", "router.fleet.feedback", "router.fleet.leases", "router.fleet.live", "router.keys.ring",
    "router.path.attempt", "router.path.call", "router.path.course", "router.path.dispatch", "router.path.relay",
    "router.path.waiting", "router.record.grounds", "router.record.instruments", "router.record.metrics",
    "router.request.exchange", "router.request.promises", "router.request.prompt_ratios", "router.request.prompt_size",
    "router.wire.head", "router.wire.sse", "router.workers.limits",
)
"""What else a request passes through."""
MODULES = (*POLICIES, *GATEWAY)
