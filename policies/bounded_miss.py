"""The `bounded_miss` preset: the cheapest backend whose chance of a miss is within a bound, as the plan had it.

The rule that `headrace` was planned with, and measured with in another simulator: the cheapest of those that miss with
at most alpha and crowd others by at most 0.05, else the lowest price with a miss at 25 mean prices; alpha by class, by
adaptive conformal inference; shed what misses with 90 % or more wherever it went. Decision 0010 says why it is not in
force. It stands here so that figures of the plan can be held against the same rule in the same runs.

**Idealised**, and not what the plan measured: it is lent all that `headrace` believes. Of queues only the rest is
waited for, each backend's calibration is corrected in predictions and prices, and who waits for a first token can be
crowded (decision 0015); the plan's had none of these. Hysteresis for sessions, planned and not simulated there, is in.
The plan sheds where p >= 0.9 and p + e > 0.3, of which the first implies the second.
"""

from policies.spec import PartSpec, Preset

PRESET = Preset(
    name="bounded_miss",
    doc="The cheapest backend whose chance of missing the caller's budget is within a bound that adapts by class.",
    prices=(PartSpec("request_cost"),),
    picker=PartSpec("bounded_miss"),
    learner="miss_bounds",
)
