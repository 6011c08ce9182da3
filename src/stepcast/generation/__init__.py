"""Generation of text by a model: memory, step times, batching, and forecasts of serving and rollouts."""
