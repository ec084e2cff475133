"""Who is next, who may slip in before, and who must make room: the pass over the waiting jobs of a pool."""
