"""Execution engines run the jobs that the allocator placed: one protocol, one file an engine, one contract suite."""
