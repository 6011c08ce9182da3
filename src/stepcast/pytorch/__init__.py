"""Everything that imports PyTorch: no other package does."""
