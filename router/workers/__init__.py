"""Several processes of one gateway: the parent, the workers, and what they share."""
