"""stepcast: forecast a distributed LLM training step, and explain one after it ran."""

__version__ = "0.1.0.dev0"
