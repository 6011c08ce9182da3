"""Steps of RL post-training: rollout, log-probabilities, updates and weight synchronisation on shared or split GPUs."""
