"""Find where tensor parallelism may split a traced step, by the flow of data and not by names.

A region starts with linear maps whose results meet again in exactly one linear map, with nothing between them that
mixes all of their features (Shoeybi et al. 2019, section 3: columns, then rows). Queries, keys and values with the
output projection are one region; gate and up with down, or the first half of an MLP with the second, another. All
operators between are split too. The result of the last map is summed over the ranks, and so is, in the backward, the
gradient of what the first maps read.

Each event gets a letter: the size of a product that is split (m, n, k, or b for its batch), h for the heads of
attention, e for the elements of all else; + where the result is summed; - for what every rank runs in full.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field

from stepcast.ir.captured import Tie
from stepcast.ir.types import dataclass
from stepcast.ir.work import Elementwise, ElementwiseKind
from stepcast.pytorch.capture.kernels import works_of
from stepcast.pytorch.capture.tracer import Event, Moment, StepTrace

K = ElementwiseKind
LINEAR = ("mm", "addmm", "linear")
BATCHED = ("bmm", "baddbmm")
REDUCTIONS = frozenset((K.ROW_SUM, K.SOFTMAX, K.LAYER_NORM, K.RMS_NORM, K.GROUP_NORM))
UNSPLIT = "-"


@dataclass
class MapRegion:
    """The operators between linear maps, as event numbers."""

    columns: list[int] = field(default_factory=list)  # the linear maps it starts with
    ends: list[int] = field(default_factory=list)  # the linear maps that read it
    inside: list[int] = field(default_factory=list)
    storages: set[int] = field(default_factory=set)
    widths: set[int] = field(default_factory=set)
    reduced: set[int] = field(default_factory=set)  # lengths that an operator sums over
    legal: bool = True

    def join(self, other: "MapRegion") -> None:
        self.columns += other.columns
        self.ends += other.ends
        self.inside += other.inside
        self.storages |= other.storages
        self.widths |= other.widths
        self.reduced |= other.reduced
        self.legal = self.legal and other.legal


@dataclass
class Splits:
    """Letters by event, and the storages of which each rank has a share."""

    letters: dict[int, str] = field(default_factory=dict)
    shared: set[int] = field(default_factory=set)

    def letters_of(self, events: Iterable[int], counts: Mapping[int, int]) -> str:
        """Return the letters of *events*, each as often as it has works; "" if none is split."""
        letters = [self.letters.get(number, UNSPLIT) for number in events for _ in range(counts[number])]
        return " ".join(letters) if any(letter != UNSPLIT for letter in letters) else ""

    def ties_of(
        self, readers: Mapping[int, Sequence[int]], layer_numbers: Mapping[int, int], trace: StepTrace
    ) -> tuple[Tie, ...]:
        """Return the parameters that several layers read; pipeline stages that separate those each have a copy.

        *readers* are the segments that read each parameter, *layer_numbers* the layers among these.
        """
        sizes, split_sizes = Counter[tuple[int, ...]](), Counter[tuple[int, ...]]()
        for storage, segments in readers.items():
            layers = tuple(sorted({layer_numbers[segment] for segment in segments if segment in layer_numbers}))
            if len(layers) > 1:
                sizes[layers] += trace.storages[storage].size_bytes
                split_sizes[layers] += trace.storages[storage].size_bytes * (storage in self.shared)
        return tuple(Tie(layers, size, split_sizes[layers]) for layers, size in sorted(sizes.items()))


def find_splits(trace: StepTrace) -> Splits:
    """Return the letters and shared storages of all regions that can be split."""
    splits = Splits()
    # The storages of parameters, and of casts of them.
    weights = {number for number, storage in enumerate(trace.storages) if storage.role == "parameters"}
    for event in trace.events:
        is_copy = event.moment is Moment.FORWARD and event.name in ("_to_copy", "copy", "clone")
        if is_copy and event.reads and all(tensor.storage in weights for tensor in event.reads):
            weights.update(tensor.storage for tensor in event.writes)
    forward = [number for number, event in enumerate(trace.events) if event.moment is Moment.FORWARD]
    recomputed = [number for number, event in enumerate(trace.events) if event.recomputed]
    region_of: dict[int, MapRegion] = {}
    split_columns: set[int] = set()  # weights
    for run in (forward, recomputed):
        for region in _find_regions(trace, run, weights):
            columns = {_operands_of(trace.events[number])[1] for number in region.columns}
            can_split = region.legal and len(region.ends) == 1 and region.widths.isdisjoint(region.reduced)
            # A recomputed region may end before the map that it leads to.
            if can_split or (run is recomputed and not region.ends and columns <= split_columns):
                split_columns |= columns
                _split_forward(trace, region, weights, splits)
                region_of |= dict.fromkeys((*region.columns, *region.ends, *region.inside), region)
    _split_backward(trace, region_of, weights, splits)
    return splits


def _operands_of(event: Event) -> tuple[int, int]:
    """Return the storages of a linear map's input and of its weight."""
    operands = event.reads[:2] if event.name == "linear" else event.reads[-2:]
    return operands[0].storage, operands[1].storage


def _find_regions(trace: StepTrace, run: Iterable[int], weights: set[int]) -> list[MapRegion]:
    region_of: dict[int, MapRegion] = {}  # by storage
    regions: list[MapRegion] = []
    learnt = set(weights)  # storages computed from weights
    for number in run:
        event = trace.events[number]
        reads = [tensor.storage for tensor in event.reads]
        writes = {tensor.storage for tensor in event.writes}
        if event.name in LINEAR and _operands_of(event)[1] in weights:
            ended = region_of.get(_operands_of(event)[0])
            if ended is not None:
                ended.ends.append(number)
            region = MapRegion([number], storages=writes.copy(), widths={event.writes[0].shape[-1]})
            regions.append(region)
            region_of |= dict.fromkeys(writes, region)
        elif regions_read := [region_of[storage] for storage in reads if storage in region_of]:
            region = regions_read[0]
            for other in regions_read[1:]:
                if other is not region:
                    region.join(other)
                    regions = [known for known in regions if known is not other]
                    region_of |= dict.fromkeys(other.storages, region)
            _extend_region(region, event, number, learnt)
            region_of |= dict.fromkeys(writes, region)
        if not learnt.isdisjoint(reads):
            learnt |= writes
    return regions


def _extend_region(region: MapRegion, event: Event, number: int, learnt: set[int]) -> None:
    """Add *event*, which reads a storage of *region*, and the storages it writes."""
    works = works_of(event)
    elementwise = [work for work in works if isinstance(work, Elementwise)]
    batched = event.name in BATCHED and all(tensor.storage in region.storages for tensor in event.reads)
    if len(elementwise) < len(works) and not (event.name == "attention" or batched):
        region.legal = False
    for tensor in event.reads:
        from_outside = tensor.storage in learnt and tensor.storage not in region.storages
        if from_outside and tensor.numel > 1 and len(tensor.shape) > 1 and tensor.shape[-1] in region.widths:
            region.legal = False  # a tensor of full width from another path, such as a residual
    if any(work.kind in REDUCTIONS for work in elementwise):
        region.reduced.update(tensor.shape[-1] for tensor in event.reads if tensor.shape)
    region.inside.append(number)  # views too: a gradient is found by the event of its forward
    region.storages.update(tensor.storage for tensor in event.writes)


def _split_forward(trace: StepTrace, region: MapRegion, weights: set[int], splits: Splits) -> None:
    for number in region.columns:
        splits.letters[number] = "n"
        splits.shared.update(weights.intersection(tensor.storage for tensor in trace.events[number].reads))
    for number in region.ends:
        splits.letters[number] = "k+"
        splits.shared.add(_operands_of(trace.events[number])[1])
    for number in region.inside:
        event = trace.events[number]
        splits.letters[number] = "h" if event.name == "attention" else "b" if event.name in BATCHED else "e"
        # Vectors as wide as the event are biases that are added separately.
        widest = max((tensor.shape[-1] for tensor in event.writes if tensor.shape), default=0)
        vectors = (tensor.storage for tensor in event.reads if tensor.shape == (widest,))
        splits.shared.update(weights.intersection(vectors))
    splits.shared |= region.storages


def _split_backward(trace: StepTrace, region_of: dict[int, MapRegion], weights: set[int], splits: Splits) -> None:
    last_gradients: dict[int, int] = {}  # by what the columns of a region read: the last event of its gradient
    forward = {tensor.storage for event in trace.events if event.moment is Moment.FORWARD or event.recomputed
               for tensor in event.writes}  # fmt: skip
    for number, event in enumerate(trace.events):
        region = region_of.get(event.source) if event.is_backward else None
        if region is None or not works_of(event):
            continue
        column, end = event.source in region.columns, event.source in region.ends
        letter = "" if end else "e"
        if event.name in LINEAR and (column or end):
            # The gradient of its input sums over the columns, or has the split size of the rows. The gradient of its
            # weight has that of its split operand: the gradient of the result for columns, the input for rows.
            left, right = event.reads[-2:]
            letter = "m" if (left.storage not in forward) == column else "n"
            if left.storage in weights or right.storage in weights:
                letter = "k" if column else "n"
            if letter == "k":
                last_gradients[_operands_of(trace.events[event.source])[0]] = number
        elif event.name.startswith("attention"):
            letter = "h"
        elif event.name in BATCHED:
            letter = "b"
        if letter:
            splits.letters[number] = letter
            if letter != "k":  # every rank has all of a sum over the split size
                splits.shared.update(tensor.storage for tensor in event.writes)
    for number in last_gradients.values():
        splits.letters[number] += "+"
