"""The allocator of training capacity: pools, one card type a job, and loans that come back on time.

Decisions are pure. What happened is an event (`allocator.events`); `allocator.apply.apply` folds events into a
`World`; `allocator.plan.plan` looks at a world and a time and says what is to be done next, as events that have not
happened yet. The journal, the service and the execution engines stand around this and hold no rule of their own.
"""
