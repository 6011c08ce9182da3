"""Whole training runs: steps, interruptions, checkpoints and repairs, in closed form and simulated."""
