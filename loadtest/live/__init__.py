"""`headrace bench policies`: the same arrivals through one gateway a policy, on engines that really run.

`fleet` starts the engines or reads their fleet file, `classes` derives promises and rate from their coefficients,
`schedule` and `prompts` lay out who asks for what, `gateways` runs one gateway a policy, `locustfile` sends,
`figures` and `intervals` judge, `run` holds it together. The counterpart on a virtual clock is `loadtest.sim`.
"""
