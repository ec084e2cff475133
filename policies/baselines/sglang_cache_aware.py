"""SGLang's router, policy `cache_aware`: `sgl-model-gateway/src/policies/cache_aware.rs` @053b63ff.

The defaults are those of `policies/mod.rs` @01f6c92a. It differs in what a prefix is: keys of blocks, or the session,
where the original keeps a radix tree of characters; and in what is evicted: the oldest beyond the engine's cache, where
the original trims its tree by nodes every 30 s. Among several backends with the same prefix it takes the least loaded.
"""

from policies.spec import PartSpec, Preset

PRESET = Preset(
    name="sglang_cache_aware",
    doc="The backend with the longest cached prefix, unless loads are far apart.",
    picker=PartSpec("cache_aware"),
    learner="prefix_map",
)
