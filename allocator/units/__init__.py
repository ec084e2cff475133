"""Normalised compute units: how much one card is worth for one family of work, from measurement, under a version."""
