"""What runs PyTorch: nothing outside this room imports it."""
