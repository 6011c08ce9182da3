"""Recomputation: complete layers, single modules of them, or every second matmul run again in the backward."""

from collections.abc import Iterable, Sequence

from stepcast.ir.layers.kernels import Ops
from stepcast.ir.layers.operators import rename_ops
from stepcast.ir.layers.sizes import Sizes
from stepcast.ir.strategy import RecomputeModule
from stepcast.ir.types import replace
from stepcast.ir.work import Collective, CollectiveKind, Elementwise, ElementwiseKind, GroupedMatmul, Matmul
from stepcast.ir.workload import Layer, Op, OpPart, Role

M = RecomputeModule
# Modules of consecutive layers.
SPANS: dict[RecomputeModule, tuple[Role, ...]] = {
    M.CORE: (Role.CORE,),
    M.LATENT_UP: (Role.LATENT_UP,),
    M.MLP: (Role.MLP_UP, Role.MLP_DOWN),
    M.EXPERTS: (
        *(Role.ROUTER, Role.DISPATCH, Role.EXPERTS_UP, Role.EXPERTS_DOWN, Role.COMBINE),
        *(Role.SHARED_UP, Role.SHARED_DOWN, Role.EXPERTS_SUM),
    ),
}
# Kernels an eager host could issue while Python handles the saved tensors of a checkpointed block (hooks of
# torch.utils.checkpoint without reentrance), in its forward and in the backward, where generators are set back before
# it runs again: of a layer, and for each kernel of its forward. 42 steps under Trainer on an H200 whose forwards and
# backwards the host decides, over the pace measured next to each (tools/measure_tuning.py).
HOOK_KERNELS, HOOK_SHARE = (26, 30), (0.45, 1.55)
CHECKPOINT_KERNELS = 17  # the forward's where a checkpoint is reentrant: 0.7 ms, gpt2-large


def recompute_modules(layers: tuple[Layer, ...], modules: Sequence[RecomputeModule]) -> tuple[Layer, ...]:
    """Return *layers* of one block whose backward runs the forward of *modules* again."""
    for module in modules:
        again: dict[int, Iterable[Op]] = {}
        if module is M.NORMS:
            # Transformer Engine's norm is a kernel of its own before routers and latent projections; elsewhere it is
            # part of the linear layer after it, which Megatron-Core does not recompute (``transformer_layer.py``).
            is_latent = any(layer.role is Role.LATENT_DOWN for layer in layers)
            separate = (Role.EXPERTS_NORM, Role.ATTENTION_NORM if is_latent else Role.EXPERTS_NORM)
            again = {index: layer.forward for index, layer in enumerate(layers) if layer.role in separate}
        elif module is M.EXPERT_ACTIVATION:
            # The recomputation of all experts contains it already.
            ups = [] if M.EXPERTS in modules else [i for i, layer in enumerate(layers) if layer.role is Role.EXPERTS_UP]
            again = {i: [op for op in layers[i].forward if op.part is OpPart.ACTIVATION] for i in ups}
        elif span := [index for index, layer in enumerate(layers) if layer.role in SPANS[module]]:
            # The last of these layers is the first in the backward, and runs all of them again; what is added to the
            # stream after a module is no part of it.
            forwards = [op for index in span for op in layers[index].forward]
            again = {span[-1]: [op for op in forwards if op.part is not OpPart.RESIDUAL]}
        for index, ops in again.items():
            last = prepend_backward(layers[index], rename_ops("recompute", ops))
            layers = (*layers[:index], last, *layers[index + 1 :])
    return layers


def recompute_block(layers: tuple[Layer, ...], stops_early: bool, hooks: bool) -> tuple[Layer, ...]:
    """Return *layers* of one block whose backward starts with their complete forward.

    torch.utils.checkpoint *stops early*, once all that the backward needs is back: a last product and what
    only adds to it is not run again. Entering a checkpoint keeps the host busy, the more if it *hooks* saved tensors.
    """
    ops = [op for layer in layers for op in layer.forward]
    if stops_early:
        # The backward of what only adds needs nothing that it computes or reads.
        adding = [
            op.part is OpPart.SUM
            or isinstance(op.work, Collective)
            or getattr(op.work, "kind", None) is ElementwiseKind.ADD
            for op in ops
        ]
        needed = len(ops) - 1 - adding[::-1].index(False)
        ops = ops[: needed + (not isinstance(ops[needed].work, Matmul | GroupedMatmul))]
    index = next(index for index, layer in enumerate(layers) if layer.forward)
    first, *rest = layers[index].forward
    # Bitsandbytes' Python around a dequantisation saves nothing more.
    kernels = sum(1 if op.name.endswith("dequantise") else op.kernels for op in ops)
    entering, leaving = CHECKPOINT_KERNELS, 0
    if hooks:
        entering, leaving = (own + round(share * kernels) for own, share in zip(HOOK_KERNELS, HOOK_SHARE, strict=True))
    entered = replace(layers[index], forward=(replace(first, kernels=entering + first.kernels), *rest))
    layers = (*layers[:index], entered, *layers[index + 1 :])
    ops[0] = replace(ops[0], kernels=leaving + ops[0].kernels)
    return (*layers[:-1], prepend_backward(layers[-1], rename_ops("recompute", ops)))


def alternate_matmuls(sizes: Sizes, layers: Sequence[Layer]) -> Ops:
    """Return what torchtitan's selective recomputation runs again of *layers*: element-wise work, gathers and
    every second matmul, that is key, output and up projections; attention and reductions are saved.
    """
    again: list[Op] = []
    for role, op in ((layer.role, op) for layer in layers for op in layer.forward):
        match op.work:
            case Elementwise() if op.part not in (OpPart.RESIDUAL, OpPart.SUM):
                again.append(op)
            case Collective(kind=CollectiveKind.ALL_GATHER):
                again.append(op)
            case Matmul() if op.name in ("key", "up") and sizes.separate_projections:
                again.append(op)
            case Matmul() if op.name in ("query", "value", "gate"):
                pass
            case Matmul() | GroupedMatmul() if op.part is OpPart.PRODUCT:
                if role is Role.QKV:
                    again.append(replace(op, work=replace(op.work, n=sizes.key_width)))
                elif role is Role.ATTENTION_OUTPUT:
                    again.append(op)
                elif role in (Role.MLP_UP, Role.EXPERTS_UP, Role.SHARED_UP) and sizes.model.gated:
                    again.append(replace(op, work=replace(op.work, n=op.work.n // 2)))
    return rename_ops("recompute", again)


def prepend_backward(layer: Layer, ops: Ops) -> Layer:
    """Return *layer* whose backward starts with *ops*."""
    return replace(layer, input_gradient=ops + layer.input_gradient) if ops else layer
