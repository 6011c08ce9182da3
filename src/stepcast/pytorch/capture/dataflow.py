"""Who makes and who reads each piece of memory of a traced step, and what a compiler may join."""

from collections import defaultdict
from dataclasses import dataclass, field

from stepcast.ir.work import Compute, Elementwise, ElementwiseKind
from stepcast.pytorch.capture.events import Event, Moment, StepTrace, Tensor
from stepcast.pytorch.capture.kernels import POINTWISE, works_of

K = ElementwiseKind
# Kinds that a compiler joins: one element for another, sums along rows, copies and lookups of all kinds.
FUSIBLE = frozenset((*POINTWISE, K.BROADCAST, K.STRIDED, K.JOIN, K.ROW_SUM, K.COLUMN_SUM, K.FILL, K.SOFTMAX,
                     K.LAYER_NORM, K.RMS_NORM, K.DROPOUT, K.CROSS_ENTROPY, K.OTHER))  # fmt: skip
GATHERS = ("embedding", "index", "index_select", "gather")
ALONE = ("cumsum", "sort", "topk", "argsort", "nonzero", "histc", "_unique2", "index_put", "scatter")


@dataclass
class KernelNode:
    """One operator that runs a kernel."""

    at: int
    event: Event
    works: tuple[Compute, ...]
    fusible: bool
    backward: bool
    level: int = 0  # products and the like that have to run before it
    reads: dict[int, Tensor] = field(default_factory=dict)
    writes: dict[int, Tensor] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Elements that it passes over."""
        tensors = (*self.reads.values(), *self.writes.values())
        return max((tensor.numel for tensor in tensors), default=0)


class Dataflow:
    """Nodes in order, and for each storage its maker and its readers."""

    def __init__(self, trace: StepTrace) -> None:
        self.trace = trace
        self.nodes: dict[int, KernelNode] = {}
        self.maker: dict[int, KernelNode] = {}  # of a storage: the first to write it
        self.makers: dict[int, list[KernelNode]] = defaultdict(list)  # and all that write it
        self.readers: dict[int, list[KernelNode]] = defaultdict(list)
        for at, event in enumerate(trace.events):
            if event.moment is not Moment.OPTIMIZER and (works := works_of(event)):
                self._add(at, event, works)
        self._delay()

    def _delay(self) -> None:
        """What is joined runs no sooner than the first that reads it."""
        for node in reversed(self.nodes.values()):
            if node.fusible:
                readers = [
                    reader.level
                    for storage in node.writes
                    for reader in self.readers[storage]
                    if reader.backward == node.backward and reader.at > node.at
                ]
                node.level = max(node.level, min(readers, default=0))

    def _add(self, at: int, event: Event, works: tuple[Compute, ...]) -> None:
        node = KernelNode(at, event, works, self._fusible(at, event, works), event.moment is Moment.BACKWARD)
        self.nodes[at] = node
        for tensor in event.reads:
            node.reads.setdefault(tensor.storage, tensor)
        inplace = event.name.endswith("_")
        for tensor in event.reads[:1] if inplace else event.writes:
            node.writes.setdefault(tensor.storage, tensor)
        for storage in node.reads:
            self.readers[storage].append(node)
            for maker in self.makers[storage]:
                after = not maker.fusible and maker.at not in self.trace.given
                node.level = max(node.level, maker.level + after)
        for storage in node.writes:
            self.maker.setdefault(storage, node)
            self.makers[storage].append(node)

    def _fusible(self, at: int, event: Event, works: tuple[Compute, ...]) -> bool:
        if at in self.trace.given or event.name.rstrip("_") in ALONE:
            return False
        if event.name in GATHERS:
            return True
        return all(isinstance(work, Elementwise) and work.kind in FUSIBLE for work in works)

    def bytes_of(self, storage: int) -> int:
        return self.trace.storages[storage].size_bytes

    def held_before(self, storage: int) -> bool:
        """Whether it was there before the step, or no operator makes it."""
        return self.trace.storages[storage].role != "activations" or storage not in self.maker
