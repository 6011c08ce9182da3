"""Chakra execution traces. ``reader`` is what the table of formats loads."""
