"""Log lines, Prometheus metrics, and the live view of the engine page."""
