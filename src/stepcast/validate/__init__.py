"""Predictions against measurements."""
