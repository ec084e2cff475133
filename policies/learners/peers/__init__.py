"""What the well-known balancers remember, each with the memory of its original and no more.

A peer's memory is its own pool belief: its picker finds the learner on `FleetView.belief`, reads it with the methods
named there, and goes on without where it finds another. None keeps anything over a restart: what a peer knows is
minutes old at most, or as in the originals lives in the process.
"""
