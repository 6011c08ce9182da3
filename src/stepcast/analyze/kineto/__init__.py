"""Analysis of PyTorch profiler (Kineto) traces; ``analysis`` is the entry point."""
