"""A captured step as torch.compile runs it: memory-bound operators that are connected become one kernel.

Operators are joined that read each other's results, or the same tensor, with no product in between (the scheduler of
PyTorch's Inductor). Such a kernel reads what was written before it and writes what others read from memory; tensors
with tiny inputs (positions, masks, cosines) are recomputed by their readers. The backward reads the saved tensors
and recomputes the rest in its own kernels.

The saved tensors are the fewest bytes from which the rest can be recomputed, by the rules of AOTAutograd's
partitioner (torch/_functorch/partitioners.py, min_cut_rematerialization_partition): results of products and of sums
along rows are not recomputed, nor random numbers, nor what a product of the backward reads, such as casts of weights,
nor what is read both before and after a product. For all else the cheapest cut is saved; a tensor that the forward
writes to memory anyway counts half as much as one that it does not. A kernel of the backward writes into saved memory
that it is the last to read.
"""

import math
from collections import defaultdict
from collections.abc import Hashable, Iterator
from dataclasses import field, replace
from typing import TYPE_CHECKING

from stepcast.cost.memory.allocator import ROUNDING
from stepcast.ir.types import DType, cached_property, dataclass, group_by_key
from stepcast.ir.work import Compute, Elementwise, ElementwiseKind, HostCopy, Matmul
from stepcast.pytorch.capture.emulation import FIT, MEASURED
from stepcast.pytorch.capture.kernels import LOOKUPS, Works, bytes_of, pass_over, works_of
from stepcast.pytorch.capture.tracer import Event, Moment, StepTrace, TracedTensor, round_up

if TYPE_CHECKING:
    import networkx as nx

K = ElementwiseKind
FUSIBLE, NEVER_FUSED, LOSSES = (frozenset(FIT["compiler"][name]) for name in ("fusible", "never_fused", "losses"))
ROW_SUMS, COLUMN_SUMS = {K.ROW_SUM, K.LAYER_NORM, K.RMS_NORM, K.SOFTMAX}, {K.COLUMN_SUM, K.NORM_WEIGHT}


def find_near_side(network: "nx.DiGraph[Hashable]", source: Hashable, sink: Hashable) -> set[Hashable]:
    """Return the nodes that *source* reaches under the maximum flow to *sink*: the near side of the cheapest cut."""
    import networkx as nx  # which PyTorch requires

    left = nx.algorithms.flow.boykov_kolmogorov(network, source, sink)
    full = [(begin, end) for begin, end, edge in left.edges(data=True) if edge["flow"] >= edge["capacity"]]
    left.remove_edges_from(full)
    return {source, *nx.descendants(left, source)}


@dataclass
class KernelNode:
    """One operator that runs a kernel."""

    number: int  # of its event
    event: Event
    works: Works
    fusible: bool
    backward: bool
    level: int = 0  # number of products and the like that have to run before it
    reads: dict[int, TracedTensor] = field(default_factory=dict)
    writes: dict[int, TracedTensor] = field(default_factory=dict)

    @cached_property
    def kinds(self) -> frozenset[ElementwiseKind]:
        return frozenset(work.kind for work in self.works if isinstance(work, Elementwise))

    @property
    def size(self) -> int:
        """Return the elements of the largest operand."""
        return max((tensor.numel for tensor in (*self.reads.values(), *self.writes.values())), default=0)


class Dataflow:
    """Nodes in order, and for each storage its writers and readers."""

    def __init__(self, trace: StepTrace) -> None:
        self.trace = trace
        self.nodes: dict[int, KernelNode] = {}
        self.maker: dict[int, KernelNode] = {}  # the first writer of a storage
        self.makers: dict[int, list[KernelNode]] = defaultdict(list)  # all writers
        self.readers: dict[int, list[KernelNode]] = defaultdict(list)
        for number, event in enumerate(trace.events):
            works = works_of(event) if event.moment is not Moment.OPTIMIZER else ()
            if not works:
                continue
            can_fuse = number not in trace.uncompiled and event.name.rstrip("_") not in NEVER_FUSED
            is_light = all(isinstance(work, Elementwise) and work.kind in FUSIBLE for work in works)
            fusible, backward = can_fuse and (event.name in LOOKUPS or is_light), event.moment is Moment.BACKWARD
            node = self.nodes[number] = KernelNode(number, event, works, fusible, backward)
            for tensor in event.reads:
                node.reads.setdefault(tensor.storage, tensor)
            for tensor in event.reads[:1] if event.name.endswith("_") else event.writes:
                node.writes.setdefault(tensor.storage, tensor)
            for storage in node.reads:
                self.readers[storage].append(node)
                for maker in self.makers[storage]:
                    delays = not maker.fusible and maker.number not in trace.uncompiled
                    node.level = max(node.level, maker.level + delays)
            for storage in node.writes:
                self.maker.setdefault(storage, node)
                self.makers[storage].append(node)
        # A fused operator runs no sooner than the first that reads its result.
        for node in reversed(self.nodes.values()):
            if node.fusible:
                readers = [reader for storage in node.writes for reader in self.readers[storage]]
                own = [other for other in readers if other.backward == node.backward and other.number > node.number]
                node.level = max(node.level, min((other.level for other in own), default=0))

    def exists_before(self, storage: int) -> bool:
        """Return True if the storage existed before the step, or no operator makes it."""
        return self.trace.storages[storage].role != "activations" or storage not in self.maker


def merge_casts(trace: StepTrace) -> set[int]:
    """Let readers of a whole tensor that was cast before read the first result; return the events of the other casts.

    Autocast casts the input of each layer that reads it; the compiler does so once.
    """
    merged = set[int]()
    first: dict[Hashable, int] = {}
    replaced: dict[int, int] = {}
    writers: dict[int, int] = defaultdict(int)
    for number, event in enumerate(trace.events):
        if any(tensor.storage in replaced for tensor in event.reads):
            reads = tuple([own._replace(storage=replaced.get(own.storage, own.storage)) for own in event.reads])
            event = trace.events[number] = event._replace(reads=reads)
        for tensor in event.reads[:1] if event.name.endswith("_") else event.writes:
            writers[tensor.storage] += 1
        if event.name != "_to_copy" or number in trace.uncompiled or not event.reads:  # those of the host read nothing
            continue
        (source,), (target,) = event.reads, event.writes
        size, whole = trace.storages[source.storage].size_bytes, round_up(int(bytes_of(source)), ROUNDING)
        state = writers[source.storage], event.moment, event.recomputed
        original = first.setdefault((source, state, target._replace(storage=0)), target.storage)
        if original != target.storage and size == whole and target.storage != source.storage:
            replaced[target.storage] = original
            merged.add(number)
            trace.events[number] = event._replace(reads=(), writes=())
    for storage, original in replaced.items():
        own, other = trace.storages[original], trace.storages[storage]
        own.freed = None if own.freed is None or other.freed is None else max(own.freed, other.freed)
        other.size_bytes = 0
        if storage in trace.returned:
            trace.returned.add(original)
    return merged


def choose_saved(flow: Dataflow) -> set[int]:
    """Return the storages of the forward that are saved for the backward."""
    import networkx as nx

    needed, needed_by_products = set(), set()
    for node in flow.nodes.values():
        for storage in node.reads if node.backward else ():
            if not flow.exists_before(storage) and not flow.maker[storage].backward:
                needed.add(storage)
                if not node.fusible:
                    needed_by_products.add(storage)
    network: nx.DiGraph[Hashable] = nx.DiGraph()  # edges without a capacity are not limited
    network.add_nodes_from(("available", "needed"))
    waiting, seen = sorted(needed), set(needed)
    for storage in needed:
        network.add_edge(("out", storage), "needed")
    while waiting:
        storage = waiting.pop()
        maker = flow.maker[storage]
        # The forward writes a tensor that an unfused operator reads.
        is_written = any(not node.fusible and not node.backward for node in flow.readers[storage])
        weight = flow.trace.storages[storage].size_bytes * (1.0 if is_written else MEASURED["unwritten_weight"])
        network.add_edge(("in", storage), ("out", storage), capacity=max(1.0, weight))
        if storage in needed_by_products or not _can_recompute(flow, maker, storage):
            network.add_edge("available", ("in", storage))
            continue
        for node in flow.makers[storage]:
            for source in node.reads:
                if flow.exists_before(source) or source == storage:
                    continue
                network.add_edge(("out", source), ("in", storage))
                if source not in seen:
                    seen.add(source)
                    waiting.append(source)
    near = find_near_side(network, "available", "needed")
    return {storage for storage in seen if ("in", storage) in near and ("out", storage) not in near}


def _can_recompute(flow: Dataflow, maker: KernelNode, storage: int) -> bool:
    """Return True if *maker* may run again in the backward."""
    levels = {node.level for node in flow.readers[storage] if node.fusible and not node.backward}
    if not maker.fusible or len(levels) > 1:  # read both before and after a product
        return False
    if K.DROPOUT in maker.kinds and storage != next(iter(maker.writes)):
        return False  # the random mask; the product with it may be recomputed
    sources = [tensor.numel for source, tensor in maker.reads.items() if not flow.exists_before(source)]
    return bool(maker.writes[storage].numel * MEASURED["reduction"] > max(sources, default=0))


FusedKernel = list[KernelNode]  # operators that run as one kernel, at the place of the last


class Fusion:
    """The kernels of a trace by the number of their event, and the storages that are in memory."""

    def __init__(self, trace: StepTrace) -> None:
        self._trace = trace
        merged = merge_casts(trace)
        self._flow = Dataflow(trace)
        self._saved = choose_saved(self._flow)
        self._backward_end = max(self._flow.nodes, default=0)
        kernels = self._join_nodes()
        self._kernel_of = {node.number: kernel for kernel in kernels for node in kernel}
        self._written = {storage for storage in self._flow.maker if self._is_written(storage)}
        self._sources: dict[tuple[int, bool], frozenset[int]] = {}
        self.works = {kernel[-1].number: self._works_of(kernel) for kernel in kernels}
        self.joined = set(self._kernel_of) - set(self.works) | merged
        for node in self._flow.nodes.values():
            if not node.fusible:
                recomputed = self._recompute_inputs(node) if node.backward else ()
                self.works[node.number] = (*recomputed, *(part for work in node.works for part in pad_product(work)))
        self._settle_memory(kernels)

    def _join_nodes(self) -> list[FusedKernel]:
        """Join fusible operators of one moment and level where one reads what another makes."""
        from networkx.utils import UnionFind

        joined = UnionFind()
        nodes = [node for node in self._flow.nodes.values() if node.fusible]
        readers: dict[tuple[int, int, bool, int], int] = {}
        for node in nodes:
            for storage, tensor in node.reads.items():
                for maker in self._flow.makers[storage]:
                    together = maker.backward == node.backward and maker.level == node.level
                    if maker.fusible and together and maker.number < node.number:
                        joined.union(maker.number, node.number)
                # So are those that pass over the same tensor, element by element.
                if tensor.numel == node.size:
                    other = readers.setdefault((storage, node.level, node.backward, node.size), node.number)
                    joined.union(other, node.number)
        kernels: dict[int, FusedKernel] = defaultdict(list)
        for node in nodes:
            kernels[joined[node.number]].append(node)
        return list(kernels.values())

    def _is_written(self, storage: int) -> bool:
        """Return True if the storage is in memory: it is saved or a result, or another kernel reads it."""
        flow = self._flow
        maker = flow.maker[storage]
        is_result = storage in self._saved or storage in self._trace.returned
        if is_result or not maker.fusible or flow.exists_before(storage):
            return True
        kernel = self._kernel_of[maker.number]
        # What the backward reads of the forward is saved or recomputed.
        readers = [node for node in flow.readers[storage] if node.backward == maker.backward]
        freed = self._trace.storages[storage].freed
        if maker.backward and (freed is None or freed > self._backward_end + 1):
            return True  # a gradient
        others = [node for node in readers if node.fusible and self._kernel_of[node.number] is not kernel]
        is_read_by_others = bool(others) and not self.is_recomputed_by_readers(storage, kernel)
        return is_read_by_others or not all(node.fusible for node in readers)

    def is_recomputed_by_readers(self, storage: int, kernel: FusedKernel) -> bool:
        """Return True if torch.compile recomputes this tensor in every kernel that reads it (its inputs are tiny)."""
        read = {source: tensor for node in kernel for source, tensor in node.reads.items()}
        written = {source for node in kernel for source in node.writes}
        inputs = bytes_of(*(tensor for source, tensor in read.items() if source not in written))
        return bool(inputs < MEASURED["tiny_input_share"] * self._trace.storages[storage].size_bytes)

    def _sources_of(self, storage: int, backward: bool) -> frozenset[int]:
        """Return the storages to read for *storage*: itself where it is in memory, else its inputs."""
        key = (storage, backward)
        if key not in self._sources:
            flow, sources = self._flow, {storage}
            recomputed = backward and storage in flow.maker and not flow.maker[storage].backward
            in_memory = storage in (self._saved if recomputed else self._written)
            if not (in_memory or flow.exists_before(storage) or not flow.maker[storage].fusible):
                self._sources[key] = frozenset()  # an operator that works in place reads its own result
                inputs = {source for node in flow.makers[storage] for source in node.reads} - {storage}
                sources = {source for read in inputs for source in self._sources_of(read, backward)}
            self._sources[key] = frozenset(sources)
        return self._sources[key]

    def _settle_memory(self, kernels: list[FusedKernel]) -> None:
        """Set the sizes and lifetimes of storages: only saved tensors outlive the forward."""
        flow, storages = self._flow, self._trace.storages
        last_use: dict[int, int] = {}
        end = max((number for number, node in flow.nodes.items() if not node.backward), default=0)
        for node in flow.nodes.values():
            for read in node.reads:
                for storage in self._sources_of(read, node.backward):
                    last_use[storage] = max(last_use.get(storage, 0), node.number)
        for storage, maker in flow.maker.items():
            if flow.exists_before(storage):
                continue
            own = storages[storage]
            if storage not in self._written:
                own.size_bytes = 0
            elif not maker.backward:
                used = last_use.get(storage, maker.number)
                if storage not in self._saved and maker.fusible:
                    used = min(used, end)
                freed = max(used, maker.number) + 1
                if storage not in self._trace.returned:
                    own.freed = freed
                elif own.freed is not None:  # else the program holds it to the end of the step
                    own.freed = max(own.freed, freed)
        read_last = group_by_key(
            (id(self._kernel_of[number]), storage)
            for storage, number in last_use.items()
            if number in self._kernel_of
            and storage not in self._trace.returned
            and not flow.exists_before(storage)
            and flow.maker[storage].number not in self._trace.uncompiled
        )
        for kernel in kernels:
            if kernel[0].backward and id(kernel) in read_last:
                self._reuse_memory(kernel, read_last[id(kernel)])

    def _reuse_memory(self, kernel: FusedKernel, given: list[int]) -> None:
        """Let a *kernel* of the backward write into the storages *given*, which it is the last to read, as Inductor
        does with results of the forward that the program does not return (torch/_inductor/scheduler.py,
        decide_inplace_update; ir.py, DonatedBuffer).
        """
        flow, storages, end = self._flow, self._trace.storages, max(node.number for node in kernel)
        for node in kernel:
            for storage in node.writes:
                if storage not in self._written or flow.exists_before(storage):
                    continue
                size = storages[storage].size_bytes
                same = next((own for own in given if storages[own].size_bytes == size > 0), None)
                if same is not None:
                    given.remove(same)
                    storages[same].freed = min(storages[same].freed or end, storages[storage].created)

    def _recompute_inputs(self, node: KernelNode) -> Iterator[Compute]:
        """Yield the kernels for what *node* of the backward reads from memory and the forward did not save."""
        for storage, tensor in node.reads.items():
            if storage not in self._saved and not self._flow.exists_before(storage):
                maker = self._flow.maker[storage]
                if maker.fusible and not maker.backward:
                    yield pass_over(K.ADD, tensor, bytes_of(*maker.reads.values()), bytes_of(tensor))

    def _works_of(self, kernel: FusedKernel) -> Works:
        """Return the works of *kernel*: one pass over its operands, and sums of columns that it does not compute."""
        apart, partial_sums, summed = self._find_column_sums(kernel)
        self._written.update(storage for node in apart for storage in node.reads if storage in summed)
        works = self._pass_over([node for node in kernel if node not in apart], partial_sums > 0)
        if partial_sums and works and isinstance(own := works[0], Elementwise):
            # As Inductor chooses them (torch/_inductor/codegen/simd.py, _pick_split_size).
            part = min(max(2 ** int(math.log2(own.rows / MEASURED["mixed_parts"])), 16), 128)
            rows = math.ceil(own.rows / part)
            read, written = 4.0 * rows * own.columns, 4.0 * own.columns
            works += (Elementwise(K.COLUMN_SUM, rows, own.columns, read, written, dtype=DType.FP32),) * partial_sums
        return (*works, *self._pass_over(apart))

    def _find_column_sums(self, kernel: FusedKernel) -> tuple[FusedKernel, int, set[int]]:
        """Return the sums of columns apart from *kernel*, the number of those in parts, and what its row sums lead to.

        A kernel that sums along rows sums columns of what it reads, too, in parts that other kernels add up, of large
        tensors with more than twice as many rows as columns (torch/_inductor/scheduler.py, MixOrderReduction).
        """
        apart, partial_sums, summed, summed_apart = list[KernelNode](), 0, set[int](), set[int]()
        sums_rows = any(node.kinds & ROW_SUMS for node in kernel)
        for node in sorted(kernel, key=lambda node: node.number):
            own_rows, is_late = bool(node.kinds & ROW_SUMS), not summed.isdisjoint(node.reads)
            if own_rows or is_late:
                summed.update(node.writes)
            results = [tensor for tensor in node.writes.values() if tensor.numel * MEASURED["unrolled"] < node.size]
            sums = len(results) if node.kinds & COLUMN_SUMS or (own_rows and node.backward) else 0
            columns = max((tensor.numel for tensor in results), default=1)
            is_large = node.size >= max(MEASURED["mixed_elements"], 2.0 * columns**2, MEASURED["mixed_rows"] * columns)
            if sums and sums_rows and is_large and not is_late:
                partial_sums += sums
            elif (sums and not own_rows) or not summed_apart.isdisjoint(node.reads):
                apart.append(node)
                summed_apart.update(node.writes)
        return apart, partial_sums, summed - summed_apart

    def _pass_over(self, kernel: FusedKernel, is_mixed: bool = False) -> Works:
        """Return one pass over all that the nodes of *kernel* read and write; *is_mixed*: it sums rows and columns."""
        flow = self._flow
        results = {storage: tensor for node in kernel for storage, tensor in node.writes.items()}
        writes = [tensor for storage, tensor in results.items() if storage in self._written]
        if not writes:
            return ()
        reads: dict[int, TracedTensor] = {}
        for node in kernel:
            for storage, tensor in node.reads.items():
                if storage in results and not flow.exists_before(storage):
                    continue
                for source in self._sources_of(storage, kernel[0].backward):
                    known = flow.maker[source].writes if source in flow.maker else flow.readers[source][0].reads
                    reads.setdefault(source, tensor if source == storage else known[source])
        # Of tables from which rows are taken only these are read.
        gathered = {node.event.reads[0].storage: bytes_of(*node.event.writes) for node in kernel
                    if node.event.name in LOOKUPS and node.event.reads}  # fmt: skip
        kind, backward = self._kind_of(kernel, is_mixed)
        operands = [tensor for storage, tensor in reads.items() if storage not in gathered and kind is not K.ROTARY]
        largest = max((*writes, *operands), key=lambda tensor: tensor.numel)
        read = sum(gathered.get(storage, bytes_of(tensor)) for storage, tensor in reads.items())
        work = pass_over(kind, largest, read, bytes_of(*writes), backward)
        if kind is K.RMS_NORM and work.columns <= MEASURED["row_in_registers"] and not is_mixed:
            work = replace(work, kind=K.FUSED_SUM)
        if work.kind in (K.RMS_NORM, K.FUSED_SUM) and any(node.event.name == "native_dropout" for node in kernel):
            # Random numbers are drawn for each pass over a row.
            return work, replace(work, kind=K.FUSED_DROPOUT, backward=False)
        return (work,)

    def _kind_of(self, kernel: FusedKernel, is_mixed: bool) -> tuple[ElementwiseKind, bool]:
        """Return the kind of a fused kernel, and whether it is priced as that of a backward."""
        names = {node.event.name for node in kernel}
        if names & LOSSES:
            return K.FUSED_LOSS, kernel[0].backward
        # Sines and cosines that are not in memory are computed on the way.
        inputs = (storage for node in kernel for storage in node.reads if storage not in self._written)
        if any(self._is_rotation(self._flow.maker.get(storage)) for storage in inputs):
            return K.ROTARY, False
        kinds = frozenset[ElementwiseKind]().union(*(node.kinds for node in kernel))
        if kinds & ROW_SUMS:
            return K.RMS_NORM, is_mixed
        if kinds & COLUMN_SUMS:
            return K.FUSED_SUM, False
        if "native_dropout" in names:
            return K.FUSED_DROPOUT, False
        if K.GELU in kinds or "tanh" in names:
            return K.GELU, K.GELU in kinds and kernel[0].backward
        return K.ADD, False

    def _is_rotation(self, maker: KernelNode | None, depth: int = 0, most_level: float = math.inf) -> bool:
        if maker is None or maker.level > most_level:
            return False
        sources = (self._flow.maker.get(storage) for storage in maker.reads)
        return maker.event.name in ("sin", "cos") or (
            depth < 4 and maker.fusible and any(self._is_rotation(node, depth + 1, maker.level) for node in sources)
        )


def pad_product(work: Compute | HostCopy) -> Works:
    """Return a product as torch.compile runs it: with copies of operands whose sizes suit no vector load.

    Source: torch/_inductor/fx_passes/pad_mm.py, which pads products that are bound by compute.
    """
    if not isinstance(work, Matmul):
        return (work,)
    size_bytes = work.dtype.bytes
    multiple = round(MEASURED["padded_bytes"] / size_bytes)
    m, n, k = work.m, work.n, work.k
    wider = replace(work, m=round_up(m, multiple), n=round_up(n, multiple), k=round_up(k, multiple))
    if wider == work or 2.0 * m * n * k / (size_bytes * (m * k + k * n + m * n)) < MEASURED["padded_flops_per_byte"]:
        return (work,)
    works: list[Compute] = []
    for rows, columns in ((m, k), (k, n)):
        if rows % multiple or columns % multiple:
            size = work.batch * rows * columns * size_bytes
            works.append(Elementwise(K.COPY, work.batch * rows, columns, size, size, dtype=work.dtype))
    return (*works, wider)
