"""A cluster in simulated time. Router, scheduler and planner are the real ones; steps take what latency models say."""
