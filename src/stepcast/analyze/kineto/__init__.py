"""PyTorch profiler (Kineto) traces explained. ``analysis`` is where to begin."""
