"""A PyTorch training step, run once on tensors without data: its operators, modules and memory."""
