"""The band of a predicted step: how measured steps of its kind lay around their predictions.

Kinds are few: a generation of GPUs, with or without experts, and steps of one GPU. Each has quantiles of
measured over predicted, learnt by ``tools/fit_band.py`` from the measurement sets; what a kind has never seen
(a framework, a generation, more GPUs, longer sequences) widens its band by as much as left-out sources,
generations and sizes needed for the same share of them to lie inside; of several such, the most.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from stepcast.hardware import Cluster
from stepcast.hardware.catalog import load_fit
from stepcast.ir.band import LEVEL, Band
from stepcast.ir.framework import Framework
from stepcast.ir.model import Model
from stepcast.ir.strategy import Strategy

ELSEWHERE = "elsewhere"


@dataclass(frozen=True, slots=True)
class BandKind:
    """Quantiles of measured over predicted, and what the rows behind them reached."""

    low: float
    middle: float
    high: float
    rows: int
    gpus: int = 0
    seq: int = 0
    frameworks: tuple[str, ...] = ()

    def widened(self, factor: float) -> tuple[float, float]:
        """Low and high *factor* times as far from the middle, on a scale of ratios."""
        return (self.middle * (self.low / self.middle) ** factor, self.middle * (self.high / self.middle) ** factor)

    def knows(self, framework: str) -> bool:
        """One that only builds on another, with a longer name, is the other with other habits."""
        return any(seen == framework or seen.startswith(f"{framework}-") for seen in self.frameworks)


@dataclass(frozen=True, slots=True)
class Bands:
    kinds: Mapping[str, BandKind]
    factors: Mapping[str, float]


def kind_of(model: Model, cluster: Cluster, strategy: Strategy) -> str:
    """The kind that a run belongs to, whether or not any was measured."""
    what = "one GPU" if strategy.layout.gpus == 1 else _model_kind(model)
    return f"{what} on {cluster.gpu.generation}"


def band_of(model: Model, cluster: Cluster, strategy: Strategy, framework: Framework) -> Band:
    """Around what a prediction says, where nine in ten of its kind were measured."""
    bands, name = default_bands(), kind_of(model, cluster, strategy)
    unseen = []
    if name not in bands.kinds:
        name = f"{_model_kind(model)} {ELSEWHERE}"
        unseen.append("generation")
    kind, layout = bands.kinds[name], strategy.layout
    if not unseen and not kind.knows(framework.name):
        unseen.append("framework")
    if layout.gpus > kind.gpus:
        unseen.append("gpus")
    if strategy.seq > kind.seq:
        unseen.append("seq")
    low, high = kind.widened(max((bands.factors[each] for each in unseen), default=1.0))
    said = {
        "generation": f"GPUs of {cluster.gpu.architecture}" + (" with experts" if model.experts else ""),
        "framework": f"framework {framework.name}",
        "gpus": f"more than {kind.gpus:,} GPUs",
        "seq": f"sequences of more than {kind.seq:,} tokens",
    }
    widened = tuple(said[each] for each in unseen)
    return Band(low, high, name, kind.rows, LEVEL, widened, measured="generation" not in unseen)


def _model_kind(model: Model) -> str:
    return "experts" if model.experts else "dense"


@lru_cache(maxsize=1)
def default_bands() -> Bands:
    return bands_of(load_fit("band"))


def bands_of(table: Mapping[str, Any]) -> Bands:
    kinds = {
        name: BandKind(**{**each, "frameworks": tuple(each.get("frameworks", ()))})
        for name, each in table["kinds"].items()
    }
    return Bands(kinds, table["widened"])
