"""Backends: what they are (`catalog`), how each engine speaks (`engines`), and the IO that reaches them."""
