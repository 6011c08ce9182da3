"""Hugging Face model configurations. ``reader`` is what the table of formats loads."""
