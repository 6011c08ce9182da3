"""Measure a GPU with PyTorch, for a calibration of the estimates."""
