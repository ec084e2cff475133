"""The path of one request: from a client's bytes by way of a decision and its attempts to the answer."""
