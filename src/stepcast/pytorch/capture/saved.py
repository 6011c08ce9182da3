"""What a compiled forward keeps for its backward: the fewest bytes from which the rest is computed again.

The rules are those of AOTAutograd's partitioner (torch/_functorch/partitioners.py,
min_cut_rematerialization_partition): what a product or a sum along rows made is not computed again, nor what
was drawn, nor what a product of the backward reads (but for casts of weights), nor what is read both before
and after a product. Of all else the cheapest cut is kept; what is written to memory in the forward anyway
counts half as much as what is not.
"""

from stepcast.ir.work import Elementwise, ElementwiseKind
from stepcast.pytorch.capture.cut import INFINITE, FlowNetwork
from stepcast.pytorch.capture.dataflow import Dataflow, KernelNode

K = ElementwiseKind
UNWRITTEN_WEIGHT = 2.0
SMALLER = 4  # times as much is read as written where an operator sums


def saved(flow: Dataflow) -> set[int]:
    """Storages of the forward that are kept."""
    needed, must = _needed(flow)
    network = FlowNetwork()
    waiting, seen = sorted(needed), set(needed)
    for storage in needed:
        network.join(("out", storage), "needed", INFINITE)
    while waiting:
        storage = waiting.pop()
        maker = flow.maker[storage]
        weight = flow.bytes_of(storage) * (1.0 if _is_written(flow, storage) else UNWRITTEN_WEIGHT)
        network.join(("in", storage), ("out", storage), max(1.0, weight))
        from_weights = all(flow.held_before(source) for source in maker.reads)
        if (storage in must and not from_weights) or not _again(flow, maker, storage):
            network.join("there", ("in", storage), INFINITE)
            continue
        for node in flow.makers[storage]:
            for source in node.reads:
                if flow.held_before(source) or source == storage:
                    continue
                network.join(("out", source), ("in", storage), INFINITE)
                if source not in seen:
                    seen.add(source)
                    waiting.append(source)
    near = network.reachable("there", "needed")
    return {storage for storage in seen if ("in", storage) in near and ("out", storage) not in near}


def _needed(flow: Dataflow) -> tuple[set[int], set[int]]:
    """What the backward reads of the forward; and what of it an operator reads that is not joined."""
    needed, must = set(), set()
    for node in flow.nodes.values():
        if not node.backward:
            continue
        for storage in node.reads:
            if flow.held_before(storage) or flow.maker[storage].backward:
                continue
            needed.add(storage)
            if not node.fusible:
                must.add(storage)
    return needed, must


def _again(flow: Dataflow, maker: KernelNode, storage: int) -> bool:
    """Whether *maker* may run again in the backward."""
    if not maker.fusible or _used_far_apart(flow, storage):
        return False
    kinds = {work.kind for work in maker.works if isinstance(work, Elementwise)}
    if K.DROPOUT in kinds and storage != next(iter(maker.writes)):
        return False  # the mask that was drawn; its product with it may be made again
    made = [tensor.numel for source, tensor in maker.reads.items() if not flow.held_before(source)]
    largest = max(made, default=0)
    return maker.writes[storage].numel * SMALLER > largest


def _used_far_apart(flow: Dataflow, storage: int) -> bool:
    levels = {node.level for node in flow.readers[storage] if node.fusible and not node.backward}
    return len(levels) > 1


def _is_written(flow: Dataflow, storage: int) -> bool:
    """Whether an operator of the forward reads it from memory."""
    return any(not node.fusible and not node.backward for node in flow.readers[storage])
