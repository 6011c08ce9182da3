"""Record a running job: a few steps in full, the others by their boundaries."""
