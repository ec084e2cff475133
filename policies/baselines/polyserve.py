"""PolyServe's load gradient: Zhu and others, "PolyServe: Efficient Multi-SLO Serving at Scale" (arXiv 2507.17769).

The highest loaded server that still keeps the budgets, the request's and those of the streams there. **Idealised**: it
is lent our prediction, drift and exact books. It differs in having no bins of servers by pace (every backend may serve
every class, as the paper allows a looser request once its own bin is full), no scaling and no chunk sizes. Load is
requests in flight over measured capacity, where the paper's servers are alike. A margin stands for the paper's care of
tails; of 1, 1.15, 1.3, 1.5 and 2 the first that keeps as much as the rest in the simulator's burst.
"""

from policies.spec import PartSpec, Preset

PRESET = Preset(
    name="polyserve",
    doc="The highest loaded backend that is still predicted to keep the budgets of the caller and of those there.",
    picker=PartSpec("load_gradient"),
    margin=1.5,
    learner="ccr",
)
