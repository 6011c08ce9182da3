"""The best few once more: with layers moved from one stage to another, and with other placements."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from stepcast.cost.memory import memory
from stepcast.forecast.predict import predict
from stepcast.hardware import Cluster, Place
from stepcast.ir.model import Model
from stepcast.ir.stages import pieces
from stepcast.ir.strategy import Strategy
from stepcast.searching.objective import OBJECTIVES, Candidate
from stepcast.searching.result import Result, SimulatedCandidate

FEW = 3
MOST_MOVES = 4


def refined(
    result: Result,
    model: Model,
    cluster: Cluster,
    objective: str = "step",
    most_bytes: float | None = None,
    few: int = FEW,
) -> Result:
    """*result* with each of the best *few* as its best variant, where that is better."""
    if not result.counts.complete:
        return result
    capacity = min(most_bytes or cluster.gpu.memory_bytes, cluster.gpu.memory_bytes)
    refining = _Refining(model, cluster, objective, capacity, result)
    better = [refining.best(each) for each in result.best[:few]]
    best = sorted((*better, *result.best[few:]), key=lambda each: each.rank)
    if result.is_late:
        return replace(result, best=tuple(best), counts=replace(result.counts, complete=False, out_of_time=True))
    return replace(result, best=tuple(best))


class _Refining:
    def __init__(self, model: Model, cluster: Cluster, objective: str, capacity: float, result: Result) -> None:
        self.model, self.cluster, self.capacity, self.result = model, cluster, capacity, result
        self.score = OBJECTIVES[objective].score

    def best(self, found: SimulatedCandidate) -> SimulatedCandidate:
        """By moves of one layer, each taken where it helps; then the other placements of that."""
        for _ in range(MOST_MOVES):
            tried = [self._tried(found, split, found.options.place) for split in moved(self.model, found.strategy)]
            best = min([found, *tried], key=lambda each: each.rank)
            if best is found:
                break
            found = best
        if self.cluster.topology.scale_up_nodes > 1:
            split = found.strategy.stage_layers
            places = [self._tried(found, split, place) for place in Place if place is not found.options.place]
            found = min([found, *places], key=lambda each: each.rank)
        return found

    def _tried(self, found: SimulatedCandidate, split: tuple[int, ...], place: Place) -> SimulatedCandidate:
        """Return *found* with its layers *split* so; itself if that is too large, or the time is over."""
        if self.result.is_late:
            return found
        strategy = replace(found.strategy, stage_layers=split)
        stages = memory(self.model, strategy, self.cluster.gpu, found.framework)
        largest = max(stage.total for stage in stages)
        if largest > self.capacity:
            return found
        options = replace(found.options, place=place)
        prediction = predict(self.model, self.cluster, strategy, found.framework, options)
        score = self.score(Candidate(prediction, largest, found.gpus, self.cluster))
        return replace(
            found, strategy=strategy, options=options, step_s=prediction.step_s, memory_bytes=largest, score=score
        )


def moved(model: Model, strategy: Strategy) -> Iterator[tuple[int, ...]]:
    """Splits with one layer moved: from either end of the model, or the stage with most, to the stages with
    least and to the ends.
    """
    if strategy.layout.pp == 1:
        return
    sizes = [len(piece.layers) for piece in pieces(model, strategy)]
    inner = range(1, len(sizes) - 1)
    ends = (0, len(sizes) - 1)
    least = min(inner, key=lambda at: (sizes[at], at), default=None)
    most = max(inner, key=lambda at: (sizes[at], -at), default=None)
    seen: set[tuple[int, ...]] = set()
    for source, target in _moves(ends, least, most):
        if sizes[source] > (1 if source in inner else 0):
            split = list(sizes)
            split[source] -= 1
            split[target] += 1
            if tuple(split) not in seen:
                seen.add(tuple(split))
                yield tuple(split)


def _moves(ends: Sequence[int], least: int | None, most: int | None) -> Iterator[tuple[int, int]]:
    first, last = ends
    yield last, first
    yield first, last
    if least is not None and most is not None:
        for end in ends:
            yield end, least
            yield most, end
