"""Routing decisions: total functions of (frozen view, now, rng). Nothing here reads a clock, a socket or a file."""
