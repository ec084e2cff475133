"""Who remembers between decisions (`policies.learning`): what a policy believes of speed, tails and caches."""
