"""Borrows from a router: its publication into offers, and its backends let go and taken back over its admin API."""
