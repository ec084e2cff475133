"""Session affinity by consistent hashing with bounded loads: Mirrokni, Thorup, Zadimoghaddam (SODA 2018, 1608.01350).

As HAProxy's `hash-balance-factor`, at the tightest factor that its manual calls reasonable, 1.25. It differs in hashing
by weighted rendezvous instead of a ring, and in its weights: the operator's times the measured capacity. What is cached
is never asked: the session is simply believed to be where it was.
"""

from policies.spec import PartSpec, Preset

PRESET = Preset(
    name="session_hash",
    doc="The session's own backend, or the next in its order that is not above its share.",
    picker=PartSpec("bounded_hash"),
)
