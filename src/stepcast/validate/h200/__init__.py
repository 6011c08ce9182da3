"""Operators, blocks and training steps measured on one H200."""
