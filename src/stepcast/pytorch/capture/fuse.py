"""A captured step as torch.compile runs it: memory-bound operators that follow one another are one kernel.

Such a kernel reads what was made before it and writes what is read after it. What a backward alone reads, and
can be computed again from what the kernel reads, is not written: the backward's kernel computes it again (the
partitioner of AOTAutograd, torch/_functorch/partitioners.py, min_cut_rematerialization_partition).
"""

from collections import defaultdict
from dataclasses import dataclass, field

from stepcast.ir.dtype import DType
from stepcast.ir.work import Compute, Elementwise, ElementwiseKind
from stepcast.pytorch.capture.events import Event, Moment, Tensor, Trace
from stepcast.pytorch.capture.kernels import POINTWISE, works_of

K = ElementwiseKind
# Kinds that a compiler joins: one element for another, sums along rows, and copies of all kinds.
FUSIBLE = frozenset((*POINTWISE, K.BROADCAST, K.STRIDED, K.JOIN, K.ROW_SUM, K.FILL, K.SOFTMAX, K.LAYER_NORM,
                     K.RMS_NORM, K.DROPOUT, K.CROSS_ENTROPY, K.OTHER))  # fmt: skip
LOSSES = ("_log_softmax", "_log_softmax_backward_data", "nll_loss_forward", "nll_loss_backward")


@dataclass
class Fused:
    """Operators of one kernel."""

    events: list[int] = field(default_factory=list)
    reads: dict[int, Tensor] = field(default_factory=dict)
    made: dict[int, Tensor] = field(default_factory=dict)


class Fusion:
    """The kernels of a trace, by the event that stands for each; and what is never in memory."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._groups = self._found()
        group_of = {at: group for group in self._groups for at in group.events}
        self._readers = self._read_by(group_of)
        self.unwritten = self._left_out(group_of)
        self.works = self._priced()
        self.joined = {at for group in self._groups for at in group.events[1:]}

    def _found(self) -> list[Fused]:
        groups: list[Fused] = []
        open_group: Fused | None = None
        moment = None
        for at, event in enumerate(self._trace.events):
            works = works_of(event)
            if not works:
                continue  # a view
            fusible = all(isinstance(work, Elementwise) and work.kind in FUSIBLE for work in works)
            if not fusible or event.moment is Moment.OPTIMIZER or event.moment is not moment:
                open_group, moment = None, event.moment
            if not fusible or event.moment is Moment.OPTIMIZER:
                continue
            if open_group is None:
                open_group = Fused()
                groups.append(open_group)
            open_group.events.append(at)
            for tensor in event.reads:
                if tensor.storage not in open_group.made:
                    open_group.reads.setdefault(tensor.storage, tensor)
            for tensor in event.writes:
                open_group.made.setdefault(tensor.storage, tensor)
        return groups

    def _read_by(self, group_of: dict[int, Fused]) -> dict[int, list[tuple[Moment, Fused | None]]]:
        """Who reads each storage: groups, or operators by themselves."""
        found: dict[int, list[tuple[Moment, Fused | None]]] = defaultdict(list)
        for at, event in enumerate(self._trace.events):
            if works_of(event):
                for tensor in event.reads:
                    found[tensor.storage].append((event.moment, group_of.get(at)))
        return found

    def _left_out(self, group_of: dict[int, Fused]) -> dict[int, Fused]:
        """Storages that are never written, and the kernel that would have."""
        found: dict[int, Fused] = {}
        for group in self._groups:
            forward = self._trace.events[group.events[0]].moment is Moment.FORWARD
            for storage in group.made:
                if self._trace.storages[storage].role != "activations" or storage in group.reads:
                    continue
                others = [
                    (moment, reader) for moment, reader in self._readers[storage] if reader is not group
                ]
                again = forward and all(
                    moment is Moment.BACKWARD and reader is not None for moment, reader in others
                )
                if not others or again:
                    found[storage] = group
        return found

    def _needed(self, group: Fused) -> dict[int, Tensor]:
        """What the kernel reads, with what it computes again replaced by what that is made of."""
        found: dict[int, Tensor] = {}
        for storage, tensor in group.reads.items():
            maker = self.unwritten.get(storage)
            found |= {storage: tensor} if maker is None else maker.reads
        return found

    def _priced(self) -> dict[int, tuple[Compute, ...]]:
        return {group.events[0]: (self._work(group),) for group in self._groups}

    def _work(self, group: Fused) -> Elementwise:
        events = [self._trace.events[at] for at in group.events]
        reads = self._needed(group)
        writes = [tensor for storage, tensor in group.made.items() if storage not in self.unwritten]
        largest = max((*reads.values(), *group.made.values()), key=lambda each: each.numel)
        columns = max(1, largest.shape[-1] if largest.shape else 1)
        return Elementwise(
            _kind(events),
            max(1, largest.numel // columns),
            columns,
            sum(_bytes(each) for each in reads.values()),
            sum(_bytes(each) for each in writes),
            dtype=DType(largest.dtype),
        )


def _kind(events: list[Event]) -> ElementwiseKind:
    kinds = {work.kind for event in events for work in works_of(event) if isinstance(work, Elementwise)}
    if any(event.name in LOSSES for event in events):
        return K.FUSED_LOSS
    if K.ROW_SUM in kinds:
        return K.RMS_NORM
    return K.SWIGLU if kinds & {K.SILU, K.GELU} else K.ADD


def _bytes(tensor: Tensor) -> float:
    return tensor.elements * DType(tensor.dtype).bytes
