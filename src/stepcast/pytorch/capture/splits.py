"""Where tensor parallelism may split a traced step, found by what flows where and not by names.

A pair: linear maps whose results meet again in one linear map alone, with nothing between them that mixes all
of their features (Shoeybi et al. 2019, section 3: columns, then rows). Queries, keys and values with the
output projection are one; gate and up, or the first half of an MLP, with its second half another. All between
is split too; after the second map its result is summed over the ranks, and in the backward the gradient of
what the first ones read.

Each event gets a letter: the size of a product that is split (m, n, k, or b, its batch), h for the heads of
attention, e for the elements of all else; + where its result is summed; - for what every rank does whole.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from stepcast.ir.work import Elementwise, ElementwiseKind
from stepcast.pytorch.capture.events import Event, Moment, StepTrace, Tensor
from stepcast.pytorch.capture.kernels import works_of

K = ElementwiseKind
LINEAR = ("mm", "addmm", "linear")
REDUCES = frozenset((K.ROW_SUM, K.SOFTMAX, K.LAYER_NORM, K.RMS_NORM, K.GROUP_NORM))
WHOLE = "-"


@dataclass
class MapRegion:
    """What lies between linear maps."""

    columns: list[int] = field(default_factory=list)  # events of those it begins with
    ends: list[int] = field(default_factory=list)  # and of those that read it
    inside: list[int] = field(default_factory=list)
    storages: set[int] = field(default_factory=set)
    widths: set[int] = field(default_factory=set)
    reduced: set[int] = field(default_factory=set)  # lengths that something in it sums over
    legal: bool = True

    def join(self, other: "MapRegion") -> None:
        for name in ("columns", "ends", "inside"):
            getattr(self, name).extend(getattr(other, name))
        for name in ("storages", "widths", "reduced"):
            getattr(self, name).update(getattr(other, name))
        self.legal = self.legal and other.legal

    @property
    def splits(self) -> bool:
        return self.legal and len(self.ends) == 1 and not self.widths & self.reduced


@dataclass
class Splits:
    """Letters by event, and the storages of which each rank has a share."""

    letters: dict[int, str] = field(default_factory=dict)
    shared: set[int] = field(default_factory=set)


def splits_of(trace: StepTrace) -> Splits:
    found = Splits()
    weights = _weights(trace)
    forward = [at for at, event in enumerate(trace.events) if event.moment is Moment.FORWARD]
    again = [at for at, event in enumerate(trace.events) if event.again]
    whose: dict[int, MapRegion] = {}
    columns: set[int] = set()  # weights of those that are split
    for run in (forward, again):
        for region in _regions(trace, run, weights):
            own = {_weight(trace.events[at]) for at in region.columns}
            # What is computed again may end before the map that it leads to.
            if not (region.splits or (run is again and not region.ends and own <= columns)):
                continue
            columns |= own
            _forward(trace, region, weights, found)
            whose |= dict.fromkeys((*region.columns, *region.ends, *region.inside), region)
    _backward(trace, whose, weights, found)
    return found


def _weights(trace: StepTrace) -> set[int]:
    """Parameters, and what is made of them alone (casts)."""
    found = {at for at, storage in enumerate(trace.storages) if storage.role == "parameters"}
    for event in trace.events:
        copies = event.moment is Moment.FORWARD and event.name in ("_to_copy", "copy", "clone")
        if copies and event.reads and all(each.storage in found for each in event.reads):
            found.update(each.storage for each in event.writes)
    return found


def _is_linear(event: Event, weights: set[int]) -> bool:
    return event.name in LINEAR and _weight(event) in weights


def _weight(event: Event) -> int:
    return event.reads[1 if event.name == "linear" else -1].storage


def _input(event: Event) -> Tensor:
    return event.reads[0] if event.name == "linear" else event.reads[-2]


def _regions(trace: StepTrace, run: Iterable[int], weights: set[int]) -> list[MapRegion]:
    region_of: dict[int, MapRegion] = {}
    found: list[MapRegion] = []
    learnt = set(weights)  # what is computed from weights
    for at in run:
        event = trace.events[at]
        reads = [each.storage for each in event.reads]
        if _is_linear(event, weights):
            own = region_of.get(_input(event).storage)
            if own is not None:
                own.ends.append(at)
            begun = MapRegion([at], storages={each.storage for each in event.writes})
            begun.widths.add(event.writes[0].shape[-1])
            found.append(begun)
            region_of.update(dict.fromkeys(begun.storages, begun))
        elif met := [region_of[storage] for storage in reads if storage in region_of]:
            one = met[0]
            for other in met[1:]:
                if other is not one:
                    one.join(other)
                    found = [each for each in found if each is not other]
                    region_of.update(dict.fromkeys(other.storages, one))
            _pass(event, at, one, learnt, region_of)
        if any(storage in learnt for storage in reads):
            learnt.update(each.storage for each in event.writes)
    return found


def _pass(event: Event, at: int, one: MapRegion, learnt: set[int], region_of: dict[int, MapRegion]) -> None:
    """*event* reads what is in the region *one*: so is what it writes."""
    works = works_of(event)
    elementwise = [work for work in works if isinstance(work, Elementwise)]
    batched = event.name in ("bmm", "baddbmm") and all(each.storage in one.storages for each in event.reads)
    if len(elementwise) < len(works) and not (event.name == "attention" or batched):
        one.legal = False
    for read in event.reads:
        strange = read.storage in learnt and read.storage not in one.storages and region_of
        if strange and read.numel > 1 and read.shape[-1:] and read.shape[-1] in one.widths and len(read.shape) > 1:
            one.legal = False  # something of full width that another way made, as a residual
    if any(work.kind in REDUCES for work in elementwise):
        one.reduced.update(each.shape[-1] for each in event.reads if each.shape)
    one.inside.append(at)  # views too: gradients are told by what they are of
    made = {each.storage for each in event.writes}
    one.storages |= made
    region_of.update(dict.fromkeys(made, one))


def _forward(trace: StepTrace, region: MapRegion, weights: set[int], found: Splits) -> None:
    for at in region.columns:
        found.letters[at] = "n"
        found.shared.update(_parameters(trace.events[at], weights))
    for at in region.ends:
        found.letters[at] = "k+"
        found.shared.add(_weight(trace.events[at]))
    for at in region.inside:
        event = trace.events[at]
        found.letters[at] = "h" if event.name == "attention" else "b" if event.name in ("bmm", "baddbmm") else "e"
        found.shared.update(_parameters(event, weights & _vectors(event)))
    found.shared |= region.storages


def _parameters(event: Event, weights: set[int]) -> set[int]:
    return {each.storage for each in event.reads if each.storage in weights}


def _vectors(event: Event) -> set[int]:
    """Operands of one dimension as wide as the event: biases that are added by themselves."""
    widest = max((each.shape[-1] for each in event.writes if each.shape), default=0)
    return {each.storage for each in event.reads if each.shape == (widest,)}


def _backward(trace: StepTrace, whose: dict[int, MapRegion], weights: set[int], found: Splits) -> None:
    summed: dict[int, int] = {}  # by what the columns of a region read: the last gradient of it
    made = {each.storage for event in trace.events if event.moment is Moment.FORWARD or event.again
            for each in event.writes}  # fmt: skip
    for at, event in enumerate(trace.events):
        region = whose.get(event.source) if event.moment is Moment.BACKWARD and not event.again else None
        if region is None or not works_of(event):
            continue
        column, end = event.source in region.columns, event.source in region.ends
        if event.name in LINEAR and (column or end):
            found.letters[at] = letter = _gradient_letter(event, column, weights, made)
            if column and letter == "k":
                summed[_input(trace.events[event.source]).storage] = at
        elif event.name.startswith("attention"):
            found.letters[at] = "h"
        elif event.name in ("bmm", "baddbmm"):
            found.letters[at] = "b"
        elif not end:
            found.letters[at] = "e"
        if found.letters.get(at, "k") != "k":  # of a sum over the split size each rank has all
            found.shared.update(each.storage for each in event.writes)
    for at in summed.values():
        found.letters[at] += "+"


def _gradient_letter(event: Event, column: bool, weights: set[int], made: set[int]) -> str:
    """Of the gradients of a linear map: of what it read, or of its weight, whose split size is that of its
    operand that is split: the gradient of its result for columns, what it read for rows.
    """
    left, right = event.reads[-2:]
    if left.storage in weights or right.storage in weights:
        return "k" if column else "n"
    gradient_left = left.storage not in made
    return "m" if gradient_left == column else "n"


def letters_of(found: Splits, events: Iterable[int], counts: dict[int, int]) -> str:
    """Those of *events*, each as often as it has works."""
    words = [found.letters.get(at, WHOLE) for at in events for _ in range(counts[at])]
    return " ".join(words) if any(word != WHOLE for word in words) else ""
