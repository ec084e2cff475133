"""Random events against the invariants: worlds, jobs, nodes, engines and routers that behave, misbehave, and repeat.

`python -m allocator.soak --seeds 10000` runs for long; the tests run what fits into their time.
"""
