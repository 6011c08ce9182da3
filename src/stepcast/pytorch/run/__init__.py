"""A workload run for real: its products, its memory traffic and its messages, in the order of its schedule."""
