"""A real job written down while it runs: a few steps in full, the others by their boundaries."""
