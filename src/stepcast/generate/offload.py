"""What leaves the GPU for the memory of its host: activations, gradients and weights, and the update there.

- Activations of a layer are sent while the next one runs; that ends once they have gone, so that no more than
  two layers' are on the GPU. They are fetched while the layer after theirs runs backward (Transformer Engine,
  ``pytorch/cpu_offload.py``; Megatron-Core's fine-grained activation offloading).
- Gradients, updates and weights follow one another in parts, so that copies run beside the update
  (Megatron-Core's --overlap-cpu-optimizer-d2h-h2d; Ren et al., ZeRO-Offload, 2021, section 4.1).
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from stepcast.generate.parts import Ops, waiting
from stepcast.generate.sizes import Sizes
from stepcast.generate.units import Unit, fed
from stepcast.ir.dtype import FP32_BYTES
from stepcast.ir.framework import Offloaded
from stepcast.ir.group import HostWay
from stepcast.ir.sharding import Partition
from stepcast.ir.work import HostCopy, HostUpdate
from stepcast.ir.workload import Layer, Op

# Copies and updates are seen in so many parts; Megatron-Core has one for each tensor, DeepSpeed one for each
# tile. More of them would change the step by less than the last part takes.
PARTS = 16


def offloading(units: Sequence[Unit]) -> list[Unit]:
    """Units that send their activations after the forward and have them back for the backward."""
    known: dict[tuple[object, ...], Unit] = {}
    found = []
    for index, unit in enumerate(units):
        own, before = unit.leaving, units[index - 1].leaving if index else 0
        begins = index == len(units) - 1
        key = (id(unit.layers), own, before, begins)
        if key not in known:
            last = _moving(unit.layers[-1], own, before, begins)
            known[key] = replace(unit, layers=(*unit.layers[:-1], last))
        found.append(known[key])
    return found


@lru_cache(maxsize=1024)
def _moving(layer: Layer, own: int, before: int, begins: bool) -> Layer:
    """The last layer of a unit that keeps *own* bytes on the host, the unit before it *before*."""
    if own:
        ready = waiting(layer.forward[-1:], ("activations out",))
        sent = _copy("activations out", HostWay.OUT, own)
        layer = replace(layer, forward=(*layer.forward[:-1], *ready, sent))
    fetched = (_copy("activations in", HostWay.IN, own),) if own else ()
    following = (_copy("activations in", HostWay.IN, before),) if before else ()
    return replace(layer, input_gradient=fed(layer.input_gradient, fetched, following, begins))


def _copy(name: str, way: HostWay, size_bytes: int, blocking: bool = False) -> Op:
    return Op(name, HostCopy(way, size_bytes), blocking)


def sent_gradients(sizes: Sizes, number: int, own: int, reduced: Ops, blocking: bool) -> Ops:
    """The gradients of *own* parameters to the host once they are *reduced*, where the software does so."""
    share = sizes.strategy.offload.optimizer
    if not share or sizes.framework.offloaded is Offloaded.STATES:
        return ()
    copy = _copy(f"gradients out {number}", HostWay.OUT, round(own * share) * sizes.gradient, blocking)
    return (replace(copy, after=tuple(op.name for op in reduced)),)


def fetched_weights(sizes: Sizes, name: str, part: Partition, parameters: int, blocking: bool) -> Ops:
    """A rank's share of *parameters* back from the host, where weights are kept there."""
    strategy, framework = sizes.strategy, sizes.framework
    if not strategy.offload.optimizer or framework.offloaded is not Offloaded.WEIGHTS:
        return ()
    wide = framework.keeps_fp32_weights(strategy)
    size = -(-parameters // part.ways) * (FP32_BYTES if wide else strategy.weights.bytes)
    return (_copy(f"{part.within} weights in {name}", HostWay.IN, int(size), blocking),)


def updated_on_host(sizes: Sizes, elements: int, moved: tuple[float, float], on_gpu: Ops) -> Ops:
    """The update of *elements* on the host, which reads and writes *moved* bytes of each; *on_gpu* is what
    the GPU updates meanwhile. Gradients that are still there go first, updated weights come back last.
    """
    if not elements:
        return on_gpu
    framework, sizes_of = sizes.framework, _parts(elements)
    read, write = moved
    updates = [
        Op(f"host update {at}", HostUpdate(read * each, write * each, framework.optimizer.fused))
        for at, each in enumerate(sizes_of)
    ]
    sent: Ops = ()
    if framework.offloaded is Offloaded.STATES:
        wide = int(FP32_BYTES) if framework.optimizer.master_weights else sizes.gradient
        sent = tuple(_copy(f"gradients out {at}", HostWay.OUT, each * wide) for at, each in enumerate(sizes_of))
        updates = [replace(op, after=(copy.name,)) for op, copy in zip(updates, sent, strict=True)]
    if framework.offloaded is Offloaded.WEIGHTS:
        return (*on_gpu, *updates)
    back = [
        # What gathers the weights waits for the last of them.
        _copy(f"weights in {at}", HostWay.IN, round(each * sizes.strategy.weights.bytes), at == len(updates) - 1)
        for at, each in enumerate(sizes_of)
    ]
    pairs = (op for pair in zip(updates, back, strict=True) for op in pair)
    return (*sent, *on_gpu, *pairs)


def _parts(elements: int) -> list[int]:
    count = min(PARTS, elements)
    return [elements * (at + 1) // count - elements * at // count for at in range(count)]
