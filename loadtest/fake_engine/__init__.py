"""An inference engine without a model: real scheduling, real step times, no matrix multiplied.

`step` is the physics (pure), `cards` the measured coefficients, `faults` what goes wrong and when (pure). `driver` runs
the physics against the clock, `wire` and `metrics_page` speak vLLM's dialect, `engine` holds the live parts together,
`inference` answers requests, and `server` puts all of it behind a socket.
"""
