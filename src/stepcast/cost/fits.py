"""The fits that ship with the package."""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from stepcast.cost.compute_fit import ComputeFit, compute_fit
from stepcast.cost.dispatch import DispatchFit
from stepcast.cost.power import PowerFit
from stepcast.hardware.catalog import load_fit

# Tables that changes replace as a whole: an architecture that was left out must not be in them.
REPLACED = ("memory_efficiency",)


@lru_cache(maxsize=1)
def default_fit() -> ComputeFit:
    """Learnt on an H200 with current PyTorch, and for fp32 on five older GPUs."""
    table, mamba, traced = load_fit("compute"), load_fit("mamba"), load_fit("transformers")
    linear = load_fit("linear")
    table["stream"] |= mamba["stream"] | traced["stream"]
    table["attention"] = merged(table["attention"], traced["attention"])
    table["spread"]["scan"] = {**table["spread"]["attention"], "hopper": mamba["spread"]}
    for kind in ("delta", "selective"):
        table[kind] = linear[kind]
        table["spread"][kind] = {**table["spread"]["attention"], "hopper": linear["spread"][kind]}
    fit = compute_fit(table | {"scan": mamba["scan"]})
    return replace(fit, power=replace(fit.power, measured=_measured_power()))


def _measured_power() -> dict[str, PowerFit]:
    """How architectures slow down that were measured at their power limit."""
    tables = {name: each for name, each in load_fit("power").items() if isinstance(each, dict)}
    return {
        name: PowerFit(**(each | {"joule_per_flop": {name: each["joule_per_flop"]}})) for name, each in tables.items()
    }


@lru_cache(maxsize=4)
def default_dispatch(modules: str = "torch", kind: str = "dispatch") -> DispatchFit:
    """The host of the measured H200, under PyTorch's own modules or those of transformers, these eager or
    compiled.
    """
    return DispatchFit(**load_fit("compute" if modules == "torch" else modules)[kind])


@lru_cache(maxsize=1)
def neusight_fit() -> tuple[ComputeFit, dict[str, float], dict[str, float]]:
    """For NeuSight's set: its older kernels, and by operator what measuring adds and the least it reads."""
    table, own = load_fit("compute"), load_fit("neusight")
    changes = {section: own[section] for section in ("matmul", "stream")}
    return compute_fit(merged(table, changes)), own["added_s"], own["least_s"]


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """*base* with the values of *changes*, table by table."""
    result = dict(base)
    for key, value in changes.items():
        old = result.get(key)
        if isinstance(value, Mapping) and isinstance(old, Mapping) and key not in REPLACED:
            result[key] = merged(old, value)
        else:
            result[key] = value
    return result
