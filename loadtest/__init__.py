"""Load for the gateway: fake engines with physics, traffic, and verdicts on what was measured."""

from compiled import load

load()
