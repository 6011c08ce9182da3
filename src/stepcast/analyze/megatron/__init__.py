"""Megatron-LM runs explained. ``analysis`` is where to begin; ``record`` makes them ready for a replay."""
