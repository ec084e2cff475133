"""The learner of the `headrace` policy: what it believes of latency, tails, classes and caches (`policies.beliefs`)."""
