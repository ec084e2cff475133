"""What is kept of requests: the decision log and its grounds, and every Prometheus name."""
