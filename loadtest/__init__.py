"""Load for the gateway: fake engines with physics, traffic, and verdicts on what was measured."""
