"""The commands that ask a running allocator, or are one: `headrace allocate`, `jobs`, `pools`, `recall` and others."""
