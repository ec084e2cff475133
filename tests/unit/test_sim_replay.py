"""The world against 300 requests that a real vLLM served: the physics test of the fake engine, through the whole world.

See `test_fake_engine_replay` for the log and the one scalar that is fitted to it. Here the requests pass a gateway, a
policy and the run-ahead engine, and must come out within the same 3 %.
"""

import gzip
import json
from dataclasses import replace

import pytest

from loadtest.sim.pools import Pool, SimBackend
from loadtest.sim.workload import Physics, SimRequest, TrafficClass, Workload
from loadtest.sim.world import World
from loadtest.traffic import Lengths
from policies.facts import Budget
from policies.learning import NoLearner
from policies.registry import build_pipeline
from policies.spec import PolicySpec
from tests.unit.test_fake_engine_replay import KV_CAPACITY_TOKENS, LLAMA_8B_BF16, LOG, summary


@pytest.mark.skipif(not LOG.exists(), reason=f"skipped: the log of the real engine is not here ({LOG.name})")
def test_the_world_replays_a_logged_vllm() -> None:
    with gzip.open(LOG, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    began_s = rows[0]["queued_ts"]
    requests = tuple(SimRequest(row["queued_ts"] - began_s, "any", row["input_toks"], row["output_toks"])
                     for row in rows)
    coefficients = replace(LLAMA_8B_BF16, kv_capacity_tokens=KV_CAPACITY_TOKENS)
    card = SimBackend("rtx", "rtx", "rtx-pro-6000", "bf16", coefficients, 128, 2048, 1.0, 16)
    classes = {"any": TrafficClass("any", Budget(), Lengths(1, 1, 1), Lengths(1, 1, 1))}
    physics = Physics(noise_sigma=0.0, hiccup_share=0.0, rtt_s=0.0, told_sigma=0.0)
    workload = Workload(requests, classes, requests[-1].arrival_s + 1.0, physics=physics, warm_up_s=0.0)
    world = World(Pool("log", (card,)), workload, [build_pipeline(PolicySpec("round_robin"))], [NoLearner()], 1).run()

    found = sorted(world.outcomes, key=lambda outcome: requests.index(outcome.request))
    simulated: dict[str, list[float]] = {"ttft": [], "latency": [], "tpot": []}
    logged: dict[str, list[float]] = {"ttft": [], "latency": [], "tpot": []}
    for outcome, row in zip(found, rows, strict=True):
        assert outcome.first_token_at_s is not None
        arrived_s, tokens = outcome.request.arrival_s, outcome.request.output_tokens
        for into, first_s, end_s in ((simulated, outcome.first_token_at_s, outcome.end_s),
                                     (logged, row["first_token_ts"] - began_s, row["last_token_ts"] - began_s)):
            into["ttft"].append(first_s - arrived_s)
            into["latency"].append(end_s - arrived_s)
            if tokens > 1:
                into["tpot"].append((end_s - first_s) / (tokens - 1))
    errors = {f"{name} {point}": value / summary(logged[name])[point] - 1
              for name in simulated for point, value in summary(simulated[name]).items()}
    print({name: f"{error:+.1%}" for name, error in errors.items()})
    assert max(map(abs, errors.values())) < 0.03, errors

