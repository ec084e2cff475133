"""Reliability as figures: a real gateway in its own process, peers that misbehave, what was measured and its bound.

Each figure is one module with one coroutine; `run` is the command.
"""
