"""Where the allocator's past is kept: an append-only journal, snapshots of the world, and who may write."""
