"""The gateway process: all that touches network, clock and disk on the way of a request."""

from compiled import load

load()
