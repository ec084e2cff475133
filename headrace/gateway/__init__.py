"""What a gateway is served, watched and given keys by: `headrace serve`, `check`, `status`, `reload`, `keys`."""
