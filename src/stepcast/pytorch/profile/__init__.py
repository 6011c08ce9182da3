"""Measuring a GPU with PyTorch, for a calibration of the prices."""
