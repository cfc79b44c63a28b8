"""A cluster in simulated time: the router, the planner and the admission that serve edits, with latency models."""
