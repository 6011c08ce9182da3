"""The memory of the GPUs of each pipeline stage, tensor by tensor, and whether it fits."""

from stepcast.cost.memory.stages import StageMemory, Verdict, memory, verdict_of

__all__ = ["StageMemory", "Verdict", "memory", "verdict_of"]
