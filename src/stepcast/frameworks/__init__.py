"""Frameworks: the decisions of training software, its defaults and its features."""
