"""The cheapest backend until it has its fill, then the next: what operators write by hand as priorities with limits.

No project's code in particular. The price is that of the request at hand. The cap is one number of requests for all
backends and knows neither their sizes nor anybody's budget, so the best has to be found by trying: of 4, 8, 16 and 24
the first keeps most budgets in the simulator's burst.
"""

from policies.spec import PartSpec, Preset

PRESET = Preset(
    name="cheapest_with_spill",
    doc="The cheapest backend below a fixed number of requests in flight.",
    prices=(PartSpec("request_cost"),),
    picker=PartSpec("spill"),
)
