"""Engines that Headrace itself starts: three real llama.cpp servers of one small model, as child processes.

`model_files` gets and makes the weights, `trio` says which engines run, `llama_server` is one engine process,
`supervisor` keeps processes alive, `calibrate` measures what each engine costs.
"""
