"""The nouns of the allocator: frozen values that events carry and the world holds. No rule lives here."""
