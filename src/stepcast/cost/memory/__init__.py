"""What fills the GPUs of each pipeline stage, tensor by tensor, and whether it fits."""

from stepcast.cost.memory.stages import StageMemory, fits, memory

__all__ = ["StageMemory", "fits", "memory"]
