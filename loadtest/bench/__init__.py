"""`headrace bench gateway`: our gateway beside its peers, on pinned cores, in one run.

`run` plans the run and drives it. `native/` is a mock engine and a load client in C, which `natives` compiles and
runs; `targets/` has one module a gateway; `workloads` says what is asked of each. What comes out of a run is pure from
there on: `figures` makes numbers of it, `rows` medians and ratios, `goals` judges, `charts` and `showing` present.
"""
