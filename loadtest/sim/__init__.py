"""The shipped policies on a virtual clock, against engines with the physics of real cards: `headrace sim`.

Nothing here decides anything. `world` moves the clock, `gateway` keeps the books as the gateway does and calls the same
`decide`, `next_attempt`, health machine and learner, `engine` runs the fake engine's iterations, `measures` counts.
The same seed gives the same run, to the last byte.
"""
