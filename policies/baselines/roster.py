"""All well-known balancers that policies are compared with: their presets, pickers and learners, one line each."""

from policies.baselines import (
    aibrix_least_latency,
    cheapest_with_spill,
    dynamo_block_cost,
    least_inflight,
    litellm_cost,
    litellm_latency,
    llmd_default,
    llmd_headroom,
    p2c,
    peak_ewma,
    polyserve,
    prequal,
    round_robin,
    session_hash,
    sglang_cache_aware,
    shortest_expected_delay,
    smg_least_load,
    weighted_least_request,
    weighted_round_robin,
)
from policies.learners.peers.latency_lists import LatencyLists
from policies.learners.peers.lifetime_means import LifetimeMeans
from policies.learners.peers.peak_ewma import PeakEwma
from policies.learners.peers.prefix_map import PrefixMap
from policies.learners.peers.ttft_by_load import TtftByLoad
from policies.learners.peers.turns import Turns
from policies.pickers.block_cost import BlockCost
from policies.pickers.bounded_hash import BoundedHash
from policies.pickers.cache_aware import CacheAware
from policies.pickers.headroom import Headroom
from policies.pickers.least_inflight import LeastInflight
from policies.pickers.least_load import LeastLoad
from policies.pickers.lifetime_latency import LifetimeLatency
from policies.pickers.litellm_latency import LiteLlmLatency
from policies.pickers.load_gradient import LoadGradient
from policies.pickers.p2c import PowerOfTwoChoices
from policies.pickers.peak_ewma import PeakEwmaOfTwo
from policies.pickers.prequal import Prequal
from policies.pickers.round_robin import RoundRobin
from policies.pickers.shortest_delay import ShortestDelay
from policies.pickers.spill import Spill
from policies.pickers.token_price import TokenPrice
from policies.pickers.weighted_least_request import WeightedLeastRequest
from policies.pickers.weighted_round_robin import WeightedRoundRobin
from policies.pickers.weighted_scores import WeightedScores

PRESETS = (
    round_robin.PRESET,
    weighted_round_robin.PRESET,
    least_inflight.PRESET,
    weighted_least_request.PRESET,
    p2c.PRESET,
    peak_ewma.PRESET,
    prequal.PRESET,
    litellm_latency.PRESET,
    litellm_cost.PRESET,
    sglang_cache_aware.PRESET,
    smg_least_load.PRESET,
    dynamo_block_cost.PRESET,
    llmd_default.PRESET,
    llmd_headroom.LEAST,
    llmd_headroom.MOST,
    aibrix_least_latency.PRESET,
    polyserve.PRESET,
    shortest_expected_delay.PRESET,
    cheapest_with_spill.PRESET,
    session_hash.PRESET,
)

PICKERS = (
    RoundRobin,
    WeightedRoundRobin,
    LeastInflight,
    WeightedLeastRequest,
    PowerOfTwoChoices,
    PeakEwmaOfTwo,
    Prequal,
    LiteLlmLatency,
    TokenPrice,
    CacheAware,
    LeastLoad,
    BlockCost,
    WeightedScores,
    Headroom,
    LifetimeLatency,
    LoadGradient,
    ShortestDelay,
    Spill,
    BoundedHash,
)

LEARNERS = (Turns, PeakEwma, TtftByLoad, LatencyLists, PrefixMap, LifetimeMeans)
