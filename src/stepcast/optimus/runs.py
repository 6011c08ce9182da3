"""A log with what explains it: its model, its steps' lengths, what it measured."""

from collections.abc import Sequence
from functools import lru_cache

from stepcast.inputs.optimus.beside import lengths_beside
from stepcast.ir.model import Model
from stepcast.ir.runlog import RunLog
from stepcast.models.catalog import load_model, model_names
from stepcast.optimus.calibration import shipped
from stepcast.optimus.fit import Observation, observe
from stepcast.optimus.machine import Machine
from stepcast.optimus.plan import OptimusPlan, plan_of_log

CLUSTER = "a40-pcie"  # which the shipped constants were fitted on


@lru_cache(maxsize=8)
def model_with(parameters: int) -> Model:
    """The Llama of the catalogue that has so many parameters: a log names the class alone."""
    for name in model_names():
        if name.startswith("llama") and load_model(name).parameters == parameters:
            return load_model(name)
    raise ValueError(f"no Llama of the catalogue has {parameters:,} parameters; name the model")


def lengths_of(log: RunLog) -> tuple[float, ...]:
    """The steps' padded lengths from the file beside a log; the shipped ones where there is none."""
    return lengths_beside(log.source) or shipped().lengths_of(log)


def planned(log: RunLog, lengths: Sequence[float] = (), model: Model | None = None) -> OptimusPlan:
    """What *log* ran; by default with `lengths_of` it and the model of as many parameters."""
    return plan_of_log(log, model or model_with(log.parameters), lengths or lengths_of(log))


def observed(
    log: RunLog, machine: Machine, lengths: Sequence[float] = (), model: Model | None = None
) -> Observation:
    """What *log* measured, and what it ran."""
    return observe(log, planned(log, lengths, model), machine)
