"""Memory of OptimusPrime's runs, tensor by tensor."""

from stepcast.optimus.memory.stages import optimus_memory

__all__ = ["optimus_memory"]
