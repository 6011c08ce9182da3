"""A captured step as torch.compile runs it: memory-bound operators that hang together are one kernel.

Operators are joined that read one another's results, or the same tensor, with no product in between (the
scheduler of PyTorch's Inductor). Such a kernel reads what was written before it and writes what others read
from memory; what is made of next to nothing (positions, masks, cosines) is computed where it is used. The
backward reads what is kept (``saved``) and computes the rest again in its own kernels.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from stepcast.ir.dtype import DType
from stepcast.ir.work import Compute, Elementwise, ElementwiseKind
from stepcast.pytorch.capture.dataflow import Dataflow, KernelNode
from stepcast.pytorch.capture.events import StepTrace, Tensor
from stepcast.pytorch.capture.padded import padded
from stepcast.pytorch.capture.saved import saved

K = ElementwiseKind
LOSSES = ("_log_softmax", "_log_softmax_backward_data", "nll_loss_forward", "nll_loss_backward")
TURNS = ("sin", "cos")
NEXT_TO_NOTHING = 0.1  # of what is written: read to make it


@dataclass
class FusedKernel:
    """Operators that run as one."""

    nodes: list[KernelNode] = field(default_factory=list)

    @property
    def stands_at(self) -> int:
        return self.nodes[-1].at

    @property
    def backward(self) -> bool:
        return self.nodes[0].backward


class Fusion:
    """The kernels of a trace, by the event that stands for each; and what is never in memory."""

    def __init__(self, trace: StepTrace) -> None:
        self._trace = trace
        self._flow = Dataflow(trace)
        self._kept = saved(self._flow)
        self._kernels = self._found()
        self._kernel_of = {node.at: kernel for kernel in self._kernels for node in kernel.nodes}
        self._written = {storage for storage in self._flow.maker if self._is_written(storage)}
        self._sources: dict[tuple[int, bool], frozenset[int]] = {}
        self.works = {kernel.stands_at: self._priced(kernel) for kernel in self._kernels}
        self.joined = set(self._kernel_of) - set(self.works)
        for node in self._flow.nodes.values():
            if not node.fusible:
                made_again = self._again(node) if node.backward else ()
                self.works[node.at] = (*made_again, *(each for work in node.works for each in padded(work)))

    def _found(self) -> list[FusedKernel]:
        """Fusible operators of one moment and level, joined where one reads what another makes."""
        parent: dict[int, int] = {}

        def root(at: int) -> int:
            while parent[at] != at:
                parent[at] = parent[parent[at]]
                at = parent[at]
            return at

        nodes = [node for node in self._flow.nodes.values() if node.fusible]
        reader: dict[tuple[int, int, bool, int], int] = {}
        for node in nodes:
            parent[node.at] = node.at
            for storage, tensor in node.reads.items():
                for maker in self._flow.makers[storage]:
                    alike = maker.backward == node.backward and maker.level == node.level
                    if maker.fusible and alike and maker.at in parent:
                        parent[root(node.at)] = root(maker.at)
                # So are those that pass over the same tensor, element by element.
                if tensor.numel == node.size:
                    other = reader.setdefault((storage, node.level, node.backward, node.size), node.at)
                    parent[root(node.at)] = root(other)
        found: dict[int, FusedKernel] = defaultdict(FusedKernel)
        for node in nodes:
            found[root(node.at)].nodes.append(node)
        return list(found.values())

    # ---- what is in memory ----------------------------------------------------------------------------

    def _is_written(self, storage: int) -> bool:
        flow = self._flow
        maker = flow.maker[storage]
        if not maker.fusible or flow.held_before(storage) or storage in self._kept:
            return True
        own = self._kernel_of[maker.at]
        for node in flow.readers[storage]:
            if node.backward != maker.backward:
                continue  # what the backward reads of the forward is kept, or computed again
            if not node.fusible:
                return True
            if self._kernel_of[node.at] is not own and not self._cheap(storage, own):
                return True
        return False

    def _cheap(self, storage: int, own: FusedKernel) -> bool:
        """Made of next to nothing: whoever reads it computes it."""
        read = {each: tensor for node in own.nodes for each, tensor in node.reads.items()}
        made = {each for node in own.nodes for each in node.writes}
        inputs = sum(_bytes(tensor) for each, tensor in read.items() if each not in made)
        return inputs < NEXT_TO_NOTHING * self._flow.bytes_of(storage)

    def _made_of(self, storage: int, backward: bool) -> frozenset[int]:
        """What has to be read for *storage*: itself where it is in memory, else what it is made of."""
        key = (storage, backward)
        if key not in self._sources:
            flow, found = self._flow, {storage}
            again = backward and storage in flow.maker and not flow.maker[storage].backward
            there = storage in self._kept if again else storage in self._written
            if not (there or flow.held_before(storage) or not flow.maker[storage].fusible):
                self._sources[key] = frozenset()  # one that is changed in place reads itself
                sources = {each for node in flow.makers[storage] for each in node.reads} - {storage}
                found = {each for source in sources for each in self._made_of(source, backward)}
            self._sources[key] = frozenset(found)
        return self._sources[key]

    def settle_memory(self) -> None:
        """Sizes and lives of what is in memory: only what is kept outlives the forward."""
        flow, storages = self._flow, self._trace.storages
        last: dict[int, int] = {}
        end = max((at for at, node in flow.nodes.items() if not node.backward), default=0)
        for node in flow.nodes.values():
            for read in node.reads:
                for storage in self._made_of(read, node.backward):
                    last[storage] = max(last.get(storage, 0), node.at)
        for storage, maker in flow.maker.items():
            if flow.held_before(storage):
                continue
            if storage not in self._written:
                storages[storage].size_bytes = 0
            elif not maker.backward:
                used = last.get(storage, maker.at)
                if storage not in self._kept and maker.fusible:
                    used = min(used, end)
                storages[storage].freed = max(used, maker.at) + 1

    # ---- what it costs --------------------------------------------------------------------------------

    def _again(self, node: KernelNode) -> Iterator[Compute]:
        """What *node* of the backward reads from memory and the forward did not keep."""
        for storage, tensor in node.reads.items():
            maker = self._flow.maker.get(storage)
            if maker is None or maker.backward or not maker.fusible or storage in self._kept:
                continue
            if self._flow.held_before(storage):
                continue
            read = sum(_bytes(each) for each in maker.reads.values())
            columns = max(1, tensor.shape[-1] if tensor.shape else 1)
            yield Elementwise(K.ADD, max(1, tensor.numel // columns), columns, read, _bytes(tensor),
                              dtype=DType(tensor.dtype))  # fmt: skip

    def _priced(self, kernel: FusedKernel) -> tuple[Compute, ...]:
        flow = self._flow
        made = {storage: tensor for node in kernel.nodes for storage, tensor in node.writes.items()}
        reads: dict[int, Tensor] = {}
        for node in kernel.nodes:
            for storage, tensor in node.reads.items():
                if storage in made and not flow.held_before(storage):
                    continue
                for source in self._made_of(storage, kernel.backward):
                    maker = flow.maker.get(source)
                    reads.setdefault(source, tensor if source == storage or maker is None
                                     else maker.writes[source])  # fmt: skip
        writes = [tensor for storage, tensor in made.items() if storage in self._written]
        if not writes:
            return ()
        gathers = _gathered(kernel.nodes)
        read = sum(gathers.get(storage, _bytes(tensor)) for storage, tensor in reads.items())
        kind = self._kind(kernel)
        seen = [] if kind is K.ROTARY else [each for at, each in reads.items() if at not in gathers]
        shown = max((*writes, *seen), key=lambda each: each.numel)
        columns = max(1, shown.shape[-1] if shown.shape else 1)
        work = Elementwise(
            kind,
            max(1, shown.numel // columns),
            columns,
            read,
            sum(_bytes(tensor) for tensor in writes),
            backward=kernel.backward and kind is K.FUSED_LOSS,
            dtype=DType(shown.dtype),
        )
        draws = any(node.event.name == "native_dropout" for node in kernel.nodes)
        if kind is K.RMS_NORM and draws:  # numbers are drawn for each pass over a row
            return work, replace(work, kind=K.DROPOUT)
        return (work,)

    def _kind(self, kernel: FusedKernel) -> ElementwiseKind:
        names = {node.event.name for node in kernel.nodes}
        if names & set(LOSSES):
            return K.FUSED_LOSS
        works = [work for node in kernel.nodes for work in node.works]
        kinds = {work.kind for work in works if isinstance(work, Elementwise)}
        if self._turns(kernel):
            return K.ROTARY
        if kinds & {K.ROW_SUM, K.LAYER_NORM, K.RMS_NORM, K.SOFTMAX}:
            return K.RMS_NORM
        return K.DROPOUT if "native_dropout" in names else K.ADD

    def _turns(self, kernel: FusedKernel) -> bool:
        """Whether sines and cosines are computed on the way."""
        for node in kernel.nodes:
            for storage in node.reads:
                maker = self._flow.maker.get(storage)
                if maker is not None and storage not in self._written and self._turned(maker, 0):
                    return True
        return False

    def _turned(self, maker: KernelNode, depth: int) -> bool:
        if maker.event.name in TURNS:
            return True
        sources = (self._flow.maker.get(storage) for storage in maker.reads)
        return depth < 4 and maker.fusible and any(
            source is not None and source.level < maker.level + 1 and self._turned(source, depth + 1)
            for source in sources
        )  # fmt: skip


def _gathered(nodes: Iterable[KernelNode]) -> dict[int, float]:
    """Bytes read of tables of which rows are taken."""
    found = {}
    for node in nodes:
        if node.event.name in ("embedding", "index", "index_select", "gather") and node.event.reads:
            found[node.event.reads[0].storage] = sum(_bytes(each) for each in node.event.writes)
    return found


def _bytes(tensor: Tensor) -> float:
    return tensor.elements * DType(tensor.dtype).bytes
