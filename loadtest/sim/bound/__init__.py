"""The bound: what a router that knows the future could reach at most, and what one did reach. Needs the extra `bound`.

`clairvoyant` is the certified linear programme, `fluid` the steady reference with its shadow prices, `hindsight` an
assignment that was replayed. `instance` has what all of them take.
"""
