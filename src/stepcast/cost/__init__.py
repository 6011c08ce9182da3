"""Cost models: pure functions from work and hardware to seconds or bytes."""
