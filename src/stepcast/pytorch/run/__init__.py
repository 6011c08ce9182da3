"""A workload run for real: its products, memory traffic and messages, in the order of its schedule."""
