"""Sweeps: many questions, answered by engines into a durable store."""
