"""One request as a noun: what its bytes ask for, under which configuration, and what became of it."""
