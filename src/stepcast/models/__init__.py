"""The catalogue of named models."""
