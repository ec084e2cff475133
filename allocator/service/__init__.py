"""The allocator's process: it listens, looks, writes down, and does. Decisions are the pure core's."""
