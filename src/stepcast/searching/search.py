"""Search from the library; refinements of the best candidates, and what would make the best one faster."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

import numpy as np

from stepcast.cost.memory import memory
from stepcast.forecast.predict import predict
from stepcast.hardware import Cluster, Place
from stepcast.ir.framework import MEGATRON_CORE, Framework
from stepcast.ir.model import Model, pieces
from stepcast.ir.strategy import Strategy
from stepcast.ir.types import dataclass
from stepcast.searching.best import MORE_BYTES, search_parts, usable_memory_bytes
from stepcast.searching.result import OBJECTIVES, ScoredPrediction, SearchResult, SearchWatch, SimulatedCandidate
from stepcast.searching.space import SearchAxes, SpacePart, build_space, useful_recomputes
from stepcast.units import format_bytes

REFINED_CANDIDATES = 3
MOST_MOVES = 4
COMPARED_CANDIDATES = 5


def search(
    model: Model,
    cluster: Cluster,
    gpus: int | Sequence[int],
    global_batch: int,
    seq: int,
    framework: Framework = MEGATRON_CORE,
    *,
    axes: Mapping[str, Sequence[Any]] | None = None,
    objective: str = "step",
    top: int = 10,
    most_bytes: float | None = None,
    reserve: float | None = None,
    watch: SearchWatch | None = None,
    workers: int = 1,
    refine: int = REFINED_CANDIDATES,
    most_s: float | None = None,
) -> SearchResult:
    """Return the *top* best strategies; *axes* restrict choices by their names in SearchAxes, as ``{"tp": (4, 8)}``.

    The result does not depend on the number of *workers*. The first *refine* of the best are also tried with uneven
    splits of layers and other placements. A candidate may use *most_bytes* of a GPU and leaves the share *reserve*
    free (``usable_memory_bytes``). After *most_s* seconds the search ends with the best so far.
    """
    numbers = (gpus,) if isinstance(gpus, int) else tuple(gpus)
    choices = {"recompute": useful_recomputes(model, framework)} | dict(axes or {})
    chosen = SearchAxes(gpus=numbers, **{name: tuple(values) for name, values in choices.items()})
    space = build_space(model, chosen, global_batch, seq, cluster.domain_gpus)
    part = SpacePart(space, framework, np.arange(len(space)))
    most_bytes = usable_memory_bytes(cluster.gpu.memory_bytes, most_bytes, reserve)
    result = search_parts([part], cluster, top, objective, most_bytes, watch, workers, most_s=most_s)
    return refine_best(result, model, cluster, objective, most_bytes, refine)


def refine_best(
    result: SearchResult,
    model: Model,
    cluster: Cluster,
    objective: str = "step",
    most_bytes: float | None = None,
    few: int = REFINED_CANDIDATES,
) -> SearchResult:
    """Replace each of the best *few* by its best variant: layers moved between stages, and other placements."""
    if not result.counts.complete:
        return result
    improve = Refinement(model, cluster, objective, most_bytes).improve
    improved = [improve(candidate, lambda: result.is_late) for candidate in result.best[:few]]
    best = tuple(sorted((*improved, *result.best[few:]), key=attrgetter("rank")))
    if result.is_late:
        return replace(result, best=best, counts=replace(result.counts, complete=False, out_of_time=True))
    return replace(result, best=best)


@dataclass(frozen=True)
class Refinement:
    """Variants of candidates: layers moved between stages, and other placements."""

    model: Model
    cluster: Cluster
    objective: str
    most_bytes: float | None

    def improve(self, candidate: SimulatedCandidate, is_late: Callable[[], bool]) -> SimulatedCandidate:
        """Move one layer at a time as long as it helps; then try the other placements."""

        def choose(variants: Iterable[tuple[tuple[int, ...], Place]]) -> SimulatedCandidate:
            tried = [self._vary(candidate, *variant) for variant in variants if not is_late()]
            return min([candidate, *tried], key=attrgetter("rank"))

        for _ in range(MOST_MOVES):
            place = candidate.options.place
            best = choose((split, place) for split in neighbour_splits(self.model, candidate.strategy))
            if best is candidate:
                break
            candidate = best
        if self.cluster.topology.scale_up_nodes > 1:
            split, own = candidate.strategy.stage_layers, candidate.options.place
            candidate = choose((split, place) for place in Place if place is not own)
        return candidate

    def _vary(self, candidate: SimulatedCandidate, split: tuple[int, ...], place: Place) -> SimulatedCandidate:
        """Return the variant, or *candidate* if the variant is too large."""
        strategy, gpu = replace(candidate.strategy, stage_layers=split), self.cluster.gpu
        largest = max(stage.total for stage in memory(self.model, strategy, gpu, candidate.framework))
        if largest > min(self.most_bytes or gpu.memory_bytes, gpu.memory_bytes):
            return candidate
        options = replace(candidate.options, place=place)
        prediction = predict(self.model, self.cluster, strategy, candidate.framework, options)
        score = OBJECTIVES[self.objective].score(ScoredPrediction(prediction, largest, candidate.gpus))
        chosen = replace(candidate, strategy=strategy, options=options)
        return replace(chosen, step_s=prediction.step_s, memory_bytes=largest, score=score)


def neighbour_splits(model: Model, strategy: Strategy) -> Iterable[tuple[int, ...]]:
    """Return splits with one layer moved.

    From either end of the model, or the inner piece with most layers, to the inner piece with fewest and to the ends.
    """
    if strategy.layout.pp == 1:
        return ()
    sizes = [len(piece.layers) for piece in pieces(model, strategy)]
    inner, first, last = range(1, len(sizes) - 1), 0, len(sizes) - 1
    moves = [(last, first), (first, last)]
    if inner:
        fewest = min(inner, key=lambda piece: (sizes[piece], piece))
        most = max(inner, key=lambda piece: (sizes[piece], -piece))
        moves += [(first, fewest), (most, first), (last, fewest), (most, last)]
    return dict.fromkeys(
        tuple(size + (piece == target) - (piece == source) for piece, size in enumerate(sizes))
        for source, target in moves
        if sizes[source] > (1 if source in inner else 0)
    )


@dataclass(frozen=True, slots=True)
class SensitivityRow:
    """The best candidate after a change."""

    words: str
    strategy: Strategy
    step_s: float
    speed_ratio: float  # tokens per second over those of the best before the change


def measure_sensitivity(
    result: SearchResult, model: Model, cluster: Cluster, few: int = COMPARED_CANDIDATES
) -> tuple[SensitivityRow, ...]:
    """Return which of the best *few* leads with twice the network, more memory or twice the batch.

    All use as many GPUs as the best.
    """
    if not result.best or not result.counts.complete or result.is_late:
        return ()
    best, rows = result.best[0], []

    def add_row(words: str, trials: Iterable[tuple[Strategy, float]]) -> None:
        strategy, step_s = min(trials, key=lambda trial: trial[1] / trial[0].tokens)
        speed = (best.step_s / best.strategy.tokens) / (step_s / strategy.tokens)
        rows.append(SensitivityRow(words, strategy, step_s, speed))

    def step_s(cluster: Cluster, candidate: SimulatedCandidate, strategy: Strategy) -> float:
        return predict(model, cluster, strategy, candidate.framework, candidate.options).step_s

    compared = [candidate for candidate in result.best if candidate.gpus == best.gpus][:few]
    if (faster := scale_network(cluster, 2.0)) is not None:
        trials = [(candidate.strategy, step_s(faster, candidate, candidate.strategy)) for candidate in compared]
        add_row("2 x network", trials)
    roomier = min(result.roomier or best, best, key=attrgetter("rank"))
    add_row(f"+{format_bytes(MORE_BYTES)}", [(roomier.strategy, roomier.step_s)])
    if result.is_late:
        return tuple(rows)
    batches = [replace(candidate.strategy, global_batch=2 * candidate.strategy.global_batch) for candidate in compared]
    doubled = zip(compared, batches, strict=True)
    add_row("2 x batch", [(strategy, step_s(cluster, candidate, strategy)) for candidate, strategy in doubled])
    return tuple(rows)


def scale_network(cluster: Cluster, times: float) -> Cluster | None:
    """Return *cluster* with links between nodes that many times as fast; None if there are none."""
    nic = cluster.node.nic
    return None if nic is None else replace(cluster, node=replace(cluster.node, nic=nic.scale(times)))
