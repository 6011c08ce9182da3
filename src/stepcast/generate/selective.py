"""Mamba blocks of the first version: norm, in-projection, convolution, time step with B and C, selective
scan, out-projection (Gu and Dao 2023, section 3.4; transformers' models/mamba and models/jamba).

No training software splits them among tensor or context parallel ranks (``ir.legality``). The convolution is
causal_conv1d's, the scan mamba_ssm's with the gate inside.
"""

from stepcast.generate.parts import K, Linear, Ops, add, layer, norm_backward, norm_forward, norm_layer
from stepcast.generate.sizes import Sizes
from stepcast.generate.tensor import column_layer, row_layer
from stepcast.ir.recurrent import Selective, SelectiveScan
from stepcast.ir.work import elementwise
from stepcast.ir.workload import Layer, Op, Role


def selective_layers(sizes: Sizes) -> tuple[Layer, ...]:
    """The layers of one block, in the order of the forward."""
    own, model, tokens = sizes.model.selective, sizes.model, sizes.tokens
    assert own is not None
    into = Linear("in", tokens, model.hidden, 2 * own.inner, sizes.dtype, adapted=False)
    out = Linear("out", tokens, own.inner, model.hidden, sizes.dtype, adapted=False)
    convolved = elementwise(K.CONVOLUTION, tokens, own.inner, 1, 1, sizes.stored)
    back = elementwise(K.CONVOLUTION, tokens, own.inner, 2, 1, sizes.stored, backward=True)
    layers = [
        norm_layer(sizes, Role.MAMBA_NORM, sizes.outer_tokens),
        column_layer(
            sizes, Role.MAMBA_IN, (into,), (Op("convolution", convolved),), (Op("convolution gradient", back),)
        ),
        _steps(sizes, own),
        _scan(sizes, own),
        row_layer(sizes, Role.MAMBA_OUT, out),
    ]
    if model.post_norms:
        layers.append(norm_layer(sizes, Role.MAMBA_POST_NORM, sizes.outer_tokens, branches=False))
    return tuple(layers)


def _steps(sizes: Sizes, own: Selective) -> Layer:
    """Time step, B and C from the channels, and the time step of each channel from its low rank; the channels
    get back gradients from here and from the scan.
    """
    low = Linear("steps", sizes.tokens, own.inner, own.steps, sizes.dtype, adapted=False)
    high = Linear("time step", sizes.tokens, own.rank, own.inner, sizes.dtype, adapted=False)
    norm: Ops = ()
    norm_gradient: Ops = ()
    if own.normed:
        norm = norm_forward(sizes, "steps norm", sizes.tokens, own.steps, heads=True)
        norm_gradient = norm_backward(sizes, "steps norm", sizes.tokens, own.steps, heads=True)
    return layer(
        Role.MAMBA_STEPS,
        (*low.forward(sizes), *norm, *high.forward(sizes)),
        (
            *high.input_gradient(sizes),
            *norm_gradient,
            *low.input_gradient(sizes),
            add(sizes, "channel gradient", sizes.tokens, own.inner),
        ),
        (*high.weight_gradient(sizes), *low.weight_gradient(sizes)),
    )


def _scan(sizes: Sizes, own: Selective) -> Layer:
    strategy = sizes.strategy
    shape = (strategy.micro_batch, strategy.seq, own.inner, own.state)
    dtype = sizes.unquantised
    return layer(
        Role.MAMBA_SCAN,
        (Op("scan", SelectiveScan(*shape, False, dtype)),),
        (Op("scan gradient", SelectiveScan(*shape, True, dtype)),),
    )
