"""Explains measured runs: where the time went, who waited for whom, and what would change it."""
