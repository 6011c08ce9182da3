"""PyTorch profiler (Kineto) traces. ``reader`` is what the table of formats loads."""
