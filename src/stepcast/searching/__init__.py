"""The best strategy: a space as columns, bounds for all of it, predictions for those that may win."""
