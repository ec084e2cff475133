"""Capacity that can be done without: demand, what is spare, and the levers that lend it and take it back."""
