"""Shortest expected delay (SED), the classic for servers of unlike speed, on predicted times to the last token.

**Idealised**: it is lent our prediction, drift and exact books. In queueing theory it is the queue with the least wait
plus service, "a natural and near-optimal policy" for two unlike servers (Selen, Adan, Kapodistria and van Leeuwaarden,
arXiv 1509.03535). Of the rules that look at latency alone it is the one to beat. It knows neither price nor budget.
"""

from policies.spec import PartSpec, Preset

PRESET = Preset(
    name="shortest_expected_delay",
    doc="The backend with the lowest predicted time to the last token.",
    picker=PartSpec("shortest_delay"),
    learner="ccr",
)
