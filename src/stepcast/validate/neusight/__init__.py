"""NeuSight's fp32 operators and models, on GPUs that the constants have seen and have not."""
