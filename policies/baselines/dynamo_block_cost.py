"""NVIDIA Dynamo's KV router: `lib/kv-router/src/scheduling/selector/default.rs` @07a6c9ce.

Blocks still to be prefilled, less those cached, plus blocks in use. It differs in what it knows of caches: what was
sent there (Dynamo's approximate mode, without the KV events of the engines), on the device only, not on hosts or disks.
Blocks in use are not counted once where requests share them.
"""

from policies.spec import PartSpec, Preset

PRESET = Preset(
    name="dynamo_block_cost",
    doc="The fewest KV blocks to prefill and in use, less the cached ones.",
    picker=PartSpec("block_cost"),
    learner="prefix_map",
)
