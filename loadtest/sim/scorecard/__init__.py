"""`headrace sim scorecard`: every claim about the policy, measured by one set of runs, each with its verdict.

`table` has the claims as data. A claim says which tasks it needs (`tasks`); each task is carried out once, whoever
needs it (`driving`), and may be kept on disk (`keeping`). The kinds of claims judge what came out (`shares`, `costs`,
`carrying`, `faults`, `coverage`, `decisions`), for the tuning seeds and for unseen ones apart (`sample`).
"""
