"""Who asks: API keys, the file they stand in, and what each may have in flight."""
