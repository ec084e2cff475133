"""`headrace sim lending`: the allocator and an inference pool together for days on a virtual clock.

Inference is not simulated request by request here: its demand comes by the minute, its capacity is measured once by
the request-level simulator, and so is the share of late requests at every load (`serving`). Jobs, loans, recalls and
checkpoints are events of the shipped allocator (`loadtest.sim.training.machines`).
"""
