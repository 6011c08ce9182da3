"""Megatron-LM per-rank traces. ``reader`` is what the table of formats loads."""
