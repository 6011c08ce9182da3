"""Training configurations of other tools, read as a model, a strategy and a framework."""
