"""The command line and the all-in-one runner."""

from compiled import load

load()
