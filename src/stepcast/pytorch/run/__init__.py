"""Run a workload: its products, memory traffic and messages, in the order of its schedule."""
