"""The 90 % interval of a predicted step, from the ratios of measured steps of its kind to their predictions.

Kinds are three: dense models, mixtures of experts, and steps of one GPU. Each has quantiles of measured over
predicted, fitted by ``tools/fit_band.py`` to the measurement sets; what a kind has never seen (a framework, a
generation of GPUs, more GPUs, longer sequences) widens its interval by as much as left-out sources, generations and
sizes needed for the same share of them to be inside; of several such, by the most.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

from msgspec import Struct

from stepcast.cost.fits import default_fit
from stepcast.hardware import Cluster
from stepcast.hardware.catalog import load_fit
from stepcast.ir.framework import Framework
from stepcast.ir.model import Model
from stepcast.ir.step import LEVEL, Band
from stepcast.ir.strategy import Strategy
from stepcast.ir.tables import Positive, convert_table
from stepcast.units import MS

EXPERTS = "experts"


class BandKind(Struct, frozen=True, forbid_unknown_fields=True):
    """Quantiles of measured over predicted, and the range of the rows behind them."""

    low: Positive
    middle: Positive
    high: Positive
    rows: int
    gpus: int = 0
    seq: int = 0
    frameworks: tuple[str, ...] = ()
    generations: tuple[str, ...] = ()

    def widen(self, factor: float) -> tuple[float, float]:
        """Return low and high *factor* times as far from the middle, on a scale of ratios."""
        return (self.middle * (self.low / self.middle) ** factor, self.middle * (self.high / self.middle) ** factor)


class Bands(Struct, frozen=True):
    kinds: Mapping[str, BandKind]
    widened: Mapping[str, float]  # factor by what a kind has not seen


@lru_cache(maxsize=1)
def default_bands() -> Bands:
    return convert_table(load_fit("band"), Bands)


def kind_of(model: Model, cluster: Cluster, strategy: Strategy) -> str:
    """Return the kind that a run belongs to, with the generation of its GPUs."""
    what = "one GPU" if strategy.layout.gpus == 1 else _model_kind(model)
    return f"{what} on {cluster.gpu.generation}"


def _model_kind(model: Model) -> str:
    return EXPERTS if model.experts else "dense"


def band_of(model: Model, cluster: Cluster, strategy: Strategy, framework: Framework) -> Band:
    """Return the interval around a prediction that holds nine in ten measurements of its kind."""
    gpu = cluster.gpu
    terms = (gpu.architecture, gpu.generation, framework.name, strategy.layout.gpus, strategy.seq)
    band, layout = _find_band(_model_kind(model), *terms), strategy.layout
    if not framework.late_message_ms or layout.pp == 1 or layout.gpus <= cluster.node.gpus:
        return band
    # A stage between two others sends and receives twice as many messages as the first and the last one.
    messages = 2 * min(2, layout.pp - 1) * (strategy.micro_batches + layout.pp - 1)
    late = (*band.widened, "late messages between stages")
    return replace(band, late_s=framework.late_message_ms * MS * messages, widened=late)


@lru_cache(maxsize=1024)
def _find_band(model: str, architecture: str, generation: str, framework: str, gpus: int, seq: int) -> Band:
    bands, name = default_bands(), "one GPU" if gpus == 1 else model
    # Runs of one benchmark do not tell of others where no product was measured.
    known = default_fit().is_measured("tensor", architecture) and generation in bands.kinds[name].generations
    if not known:
        name = model
    kind = bands.kinds[name]
    # The framework was measured, or one with a longer name that builds on it.
    run = any(known_name == framework or known_name.startswith(f"{framework}-") for known_name in kind.frameworks)
    unseen = {
        "generation": "" if known else f"GPUs of {architecture}{' with experts' * (model == EXPERTS)}",
        "framework": f"framework {framework}" if known and not run else "",
        "gpus": f"more than {kind.gpus:,} GPUs" if gpus > kind.gpus else "",
        "seq": f"sequences of more than {kind.seq:,} tokens" if seq > kind.seq else "",
    }
    low, high = kind.widen(max((bands.widened[key] for key, text in unseen.items() if text), default=1.0))
    return Band(low, high, name, kind.rows, LEVEL, tuple(filter(None, unseen.values())), measured=known)
