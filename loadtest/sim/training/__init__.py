"""`headrace sim training`: Gavel's own jobs on Gavel's own cluster, placed by the shipped allocator on a virtual clock.

`machines` is the world outside of the allocator, for this room and for `loadtest.sim.lending`.
"""
