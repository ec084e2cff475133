"""What asks a running allocator, or is one: `headrace allocate`, `jobs`, `pools`, `loans`, `recall`, `quota`, `top`."""
