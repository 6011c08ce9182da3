"""What a backward runs again before it needs it: whole layers, or single modules of them."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from stepcast.generate.parts import Ops, renamed
from stepcast.ir.strategy import RecomputeModule
from stepcast.ir.work import Collective, ElementwiseKind, GroupedMatmul, Matmul
from stepcast.ir.workload import Layer, Op, OpPart, Role

M = RecomputeModule
# Modules of consecutive layers.
SPANS: dict[RecomputeModule, tuple[Role, ...]] = {
    M.CORE: (Role.CORE,),
    M.LATENT_UP: (Role.LATENT_UP,),
    M.MLP: (Role.MLP_UP, Role.MLP_DOWN),
    M.EXPERTS: (
        Role.ROUTER,
        Role.DISPATCH,
        Role.EXPERTS_UP,
        Role.EXPERTS_DOWN,
        Role.COMBINE,
        Role.SHARED_UP,
        Role.SHARED_DOWN,
        Role.EXPERTS_SUM,
    ),
}
# What an eager host could issue of light kernels while it enters a checkpointed block and saves the states of
# the random generators: 0.7 ms, fitted to the forwards of gpt2-large with and without it on an H200.
CHECKPOINT_KERNELS = 17


def recomputed(layers: tuple[Layer, ...], modules: Sequence[RecomputeModule]) -> tuple[Layer, ...]:
    """*layers* of one block whose backward runs the forward of *modules* again."""
    for module in modules:
        match module:
            case M.NORMS:
                latent = any(layer.role is Role.LATENT_DOWN for layer in layers)
                layers = _each(layers, partial(_own_norm, latent))
            case M.EXPERT_ACTIVATION:
                # The whole module's recomputation holds it already.
                if M.EXPERTS not in modules:
                    layers = _each(layers, _expert_activation)
            case _:
                layers = _span(layers, SPANS[module])
    return layers


def run_again(layers: tuple[Layer, ...], stops_early: bool) -> tuple[Layer, ...]:
    """*layers* of one block whose backward starts with their whole forward.

    torch.utils.checkpoint *stops early*, once all that the backward needs is back: a last product and what
    only adds to it is not run again. Entering a checkpoint keeps the host.
    """
    ops = [op for layer in layers for op in layer.forward]
    if stops_early:
        needed = next(at for at in reversed(range(len(ops))) if not _adds(ops[at]))
        ops = ops[: needed + (not isinstance(ops[needed].work, Matmul | GroupedMatmul))]
    at = next(at for at, layer in enumerate(layers) if layer.forward)
    first, *rest = layers[at].forward
    entered = replace(layers[at], forward=(replace(first, kernels=CHECKPOINT_KERNELS + first.kernels), *rest))
    layers = (*layers[:at], entered, *layers[at + 1 :])
    return (*layers[:-1], before(layers[-1], renamed("recompute", ops)))


def _adds(op: Op) -> bool:
    """Whether its backward needs nothing that it computes or reads."""
    return isinstance(op.work, Collective) or getattr(op.work, "kind", None) is ElementwiseKind.ADD


def before(layer: Layer, ops: Ops) -> Layer:
    """*layer* whose backward starts with *ops*."""
    return replace(layer, input_gradient=ops + layer.input_gradient)


def _span(layers: tuple[Layer, ...], roles: tuple[Role, ...]) -> tuple[Layer, ...]:
    """The last of these layers is the first in the backward, and runs all of them again; what is added to the
    stream after a module is no part of it.
    """
    at = [index for index, layer in enumerate(layers) if layer.role in roles]
    if not at:
        return layers
    forwards = (op for index in at for op in layers[index].forward)
    again = renamed("recompute", (op for op in forwards if op.part is not OpPart.RESIDUAL))
    last = at[-1]
    return (*layers[:last], before(layers[last], again), *layers[last + 1 :])


def _each(layers: tuple[Layer, ...], again: Callable[[Layer], Ops]) -> tuple[Layer, ...]:
    return tuple(before(layer, ops) if (ops := again(layer)) else layer for layer in layers)


def _own_norm(latent: bool, layer: Layer) -> Ops:
    """Transformer Engine's norm is a kernel of its own before routers and latent projections; elsewhere it is
    part of the linear layer after it, which Megatron-Core does not recompute (``transformer_layer.py``).
    """
    own = layer.role is Role.EXPERTS_NORM or (layer.role is Role.ATTENTION_NORM and latent)
    return renamed("recompute", layer.forward) if own else ()


def _expert_activation(layer: Layer) -> Ops:
    if layer.role is not Role.EXPERTS_UP:
        return ()
    return renamed("recompute", (op for op in layer.forward if op.part is OpPart.ACTIVATION))
