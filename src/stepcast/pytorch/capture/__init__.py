"""Run a PyTorch training step once on tensors without data, and keep its operators, modules and memory."""
