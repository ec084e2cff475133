"""All routes but inference: what clients ask besides, and the operators' listener."""
