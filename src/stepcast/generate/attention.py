"""Attention blocks: norm, projections, rotary embedding, the core, the output projection."""

from stepcast.generate.context import core_layer
from stepcast.generate.parts import (
    K,
    Linear,
    Ops,
    collective,
    gated,
    layer,
    norm_backward,
    norm_forward,
    norm_layer,
    waiting,
    with_sums,
)
from stepcast.generate.rotated import written_joining, written_rotary, written_rotary_gradient
from stepcast.generate.sizes import Sizes
from stepcast.generate.tensor import GATHER, SCATTER, column_layer, column_waits, row_layer, tensor_bytes
from stepcast.ir.group import Group
from stepcast.ir.model_parts import LayerParts, PositionKind, QkNorm
from stepcast.ir.work import ElementwiseKind, elementwise
from stepcast.ir.workload import Layer, Op, Role


def attention_layers(sizes: Sizes, block: LayerParts) -> tuple[Layer, ...]:
    """The layers of one attention half, in the order of the forward."""
    model = sizes.model
    output = Linear(
        "output", sizes.tokens, sizes.output_width, model.hidden, sizes.dtype, bias=model.biases.attention_output
    )
    qkv = _latent_layers(sizes) if model.latent else (_qkv_layer(sizes),)
    layers = [
        norm_layer(
            sizes,
            Role.ATTENTION_NORM,
            sizes.outer_tokens,
            column_waits(sizes, Role.LATENT_DOWN if model.latent else Role.QKV),
            products=3,
        ),
        *qkv,
        core_layer(sizes, block),
        *(gate_layers(sizes) if model.attention_gate else ()),
        row_layer(sizes, Role.ATTENTION_OUTPUT, output),
    ]
    if model.post_norms:
        layers.append(norm_layer(sizes, Role.ATTENTION_POST_NORM, sizes.outer_tokens, branches=False))
    return tuple(layers)


def _qkv_layer(sizes: Sizes) -> Layer:
    if sizes.separate:
        return _separate_layer(sizes)
    width = sizes.qkv_width // sizes.tp
    linear = Linear("qkv", sizes.tokens, sizes.model.hidden, width, sizes.dtype, bias=sizes.model.biases.qkv)
    forward, backward = _on_heads(sizes)
    if sizes.by_operation:
        backward = (*backward, *written_joining(sizes))
    elif sizes.plain_gradients:
        # Autograd joins the gradients of queries, keys and values, which are slices of one result.
        joined = elementwise(
            K.COPY, sizes.tokens, sizes.query_width + sizes.key_width + sizes.value_width, 1, 1, sizes.stored
        )
        backward = (*backward, Op("join gradients", joined))
    if sizes.shares_kv_heads:
        gathered, scattered = _shared_heads(sizes)
        forward, backward = (*gathered, *forward), (*backward, *scattered)
    return column_layer(sizes, Role.QKV, (linear,), forward, backward)


def _separate_layer(sizes: Sizes) -> Layer:
    """A product each for queries, keys and values; what their input gets back is added up."""
    query = sizes.query_width * (2 if sizes.model.attention_gate else 1)
    widths = {"query": query, "key": sizes.key_width, "value": sizes.value_width}
    bias = sizes.model.biases.qkv
    linears = tuple(
        Linear(name, sizes.tokens, sizes.model.hidden, width, sizes.dtype, bias=bias) for name, width in widths.items()
    )
    layer = column_layer(sizes, Role.QKV, linears, *_on_heads(sizes))
    return with_sums(sizes, layer, len(linears))


def gate_layers(sizes: Sizes) -> tuple[Layer, ...]:
    """What attention returns times the sigmoid of its gate."""
    rows, width = sizes.tokens, sizes.output_width
    forward, backward = gated(sizes, "gate", rows, width)
    return (layer(Role.ATTENTION_GATE, forward, backward),)


def _shared_heads(sizes: Sizes) -> tuple[Ops, Ops]:
    """Fewer kv heads than tensor ranks: each rank multiplies its slice of the projection, all gather the
    whole and take their queries and the head these look at; gradients are summed and split again.

    Source: Megatron-Core, transformer/attention.py (num_query_groups < world_size) and
    tensor_parallel/mappings.py, which joins and splits columns by a copy.
    """
    size, whole = tensor_bytes(sizes, sizes.qkv_width), (sizes.tokens, sizes.qkv_width)
    copy = elementwise(K.COPY, *whole, 1, 1, sizes.stored)
    gather = collective("qkv heads tp all-gather", GATHER, size, Group.TP)
    scatter = collective("qkv heads tp reduce-scatter", SCATTER, size, Group.TP)
    fill = elementwise(K.FILL, *whole, 0, 1, sizes.stored)  # what the rank took no part of has no gradient
    return (
        (gather, Op("join heads", copy)),
        (Op("heads gradient fill", fill), Op("split heads gradient", copy), scatter),
    )


def _on_heads(sizes: Sizes) -> tuple[Ops, Ops]:
    """Norm of queries and keys and their rotary embedding, which plain PyTorch turns one after the other."""
    model, tokens = sizes.model, sizes.tokens
    width = sizes.query_width + sizes.key_width
    turned = {"": width} if sizes.fused else {"query ": sizes.query_width, "key ": sizes.key_width}
    forward: list[Op] = []
    backward: list[Op] = []
    # Modules written in Python norm queries and keys one after the other.
    normed = turned if sizes.by_operation else {"query key ": width}
    shapes = {
        name: (tokens, each) if model.qk_norm is QkNorm.WHOLE else (tokens * each // model.head_dim, model.head_dim)
        for name, each in normed.items()
        if model.qk_norm is not QkNorm.NONE
    }
    for name, shape in shapes.items():
        forward += norm_forward(sizes, f"{name}norm", *shape, heads=True)
    if model.position.kind is PositionKind.ROTARY:
        forward += (op for name, each in turned.items() for op in rotary(sizes, each, name))
        backward += (op for name, each in reversed(turned.items()) for op in rotary_gradient(sizes, each, name))
    for name, shape in shapes.items():
        backward += norm_backward(sizes, f"{name}norm", *shape, heads=True)
    return tuple(forward), tuple(backward)


def rotary(sizes: Sizes, width: int, name: str = "") -> Ops:
    """x cos + rotate(x) sin. Plain PyTorch writes every intermediate."""
    tokens, dtype = sizes.tokens, sizes.stored
    if sizes.by_operation:
        return written_rotary(sizes, width, name)
    if sizes.fused:
        return (Op("rotary", elementwise(K.ROTARY, tokens, width, 1, 1, dtype)),)
    half = max(1, width // 2)
    return (
        Op(f"{name}rotary cos", elementwise(K.ROTARY, tokens, width, 1, 1, dtype)),
        Op(f"{name}rotary negate", elementwise(K.ROTARY, tokens, half, 1, 1, dtype)),
        Op(f"{name}rotary join", elementwise(K.ROTARY, tokens, width, 1, 1, dtype)),
        Op(f"{name}rotary sin", elementwise(K.ROTARY, tokens, width, 1, 1, dtype)),
        Op(f"{name}rotary sum", elementwise(K.ROTARY, tokens, width, 2, 1, dtype)),
    )


def rotary_gradient(sizes: Sizes, width: int, name: str = "") -> Ops:
    """Each half goes back into a whole filled with zeros, the second with its sign turned."""
    tokens, dtype = sizes.tokens, sizes.stored
    if sizes.by_operation:
        return written_rotary_gradient(sizes, width, name)
    if sizes.fused:
        return (Op("rotary gradient", elementwise(K.ROTARY, tokens, width, 1, 1, dtype)),)
    half = max(1, width // 2)
    return (
        Op(f"{name}rotary gradient sin", elementwise(K.ROTARY, tokens, width, 1, 1, dtype)),
        Op(f"{name}rotary gradient second fill", elementwise(K.FILL, tokens, width, 0, 1, dtype)),
        Op(f"{name}rotary gradient second half", elementwise(K.ROTARY, tokens, half, 1, 1, dtype)),
        Op(f"{name}rotary gradient negate", elementwise(K.ROTARY, tokens, half, 1, 1, dtype)),
        Op(f"{name}rotary gradient first fill", elementwise(K.FILL, tokens, width, 0, 1, dtype)),
        Op(f"{name}rotary gradient first half", elementwise(K.ROTARY, tokens, half, 1, 1, dtype)),
        Op(f"{name}rotary gradient add", elementwise(K.ADD, tokens, width, 2, 1, dtype)),
        Op(f"{name}rotary gradient cos", elementwise(K.ROTARY, tokens, width, 1, 1, dtype)),
        Op(f"{name}rotary gradient sum", elementwise(K.ROTARY, tokens, width, 2, 1, dtype)),
        Op(f"{name}rotary gradient copy", elementwise(K.ROTARY, tokens, width, 1, 1, dtype)),
    )


def _latent_layers(sizes: Sizes) -> tuple[Layer, ...]:
    """Multi-head latent attention (DeepSeek-V2, 2024, section 2.1): down, norm, up to the heads.

    The down-projections are on every tensor rank and run on the tokens outside tensor regions.
    """
    model, latent = sizes.model, sizes.model.latent
    assert latent is not None
    outer, hidden, dtype = sizes.outer_tokens, model.hidden, sizes.dtype
    down = [Linear("kv down", outer, hidden, latent.kv_rank + latent.rope_dim, dtype)]
    up = [Linear("kv up", sizes.tokens, latent.kv_rank, sizes.heads * (latent.nope_dim + latent.value_dim), dtype)]
    normed = latent.kv_rank
    if latent.query_rank:
        down.insert(0, Linear("query down", outer, hidden, latent.query_rank, dtype))
        up.insert(0, Linear("query up", sizes.tokens, latent.query_rank, sizes.query_width, dtype))
        normed += latent.query_rank
    else:
        up.insert(0, Linear("query", sizes.tokens, hidden, sizes.query_width, dtype))
    rotated = (sizes.heads + 1) * latent.rope_dim
    forward, backward = rotary(sizes, rotated), rotary_gradient(sizes, rotated)
    if sizes.by_operation:
        joined, parted = _written_heads(sizes)
        forward, backward = forward + joined, parted + backward
    gradients = tuple(op for linear in down for op in linear.input_gradient(sizes))
    norms = norm_backward(sizes, "latent norm", outer, normed)
    lower = layer(
        Role.LATENT_DOWN,
        (*(op for linear in down for op in linear.forward(sizes)), *norm_forward(sizes, "latent norm", outer, normed)),
        (*waiting(norms, column_waits(sizes, Role.LATENT_UP)), *gradients),
        tuple(op for linear in down for op in linear.weight_gradient(sizes)),
    )
    upper = column_layer(
        sizes,
        Role.LATENT_UP,
        tuple(up),
        forward,
        backward,
        width=normed + latent.rope_dim + (0 if latent.query_rank else hidden),
    )
    return lower, upper


def _written_heads(sizes: Sizes) -> tuple[Ops, Ops]:
    """Queries and keys put together from what is turned and what is not, and their gradients taken apart,
    joined with those of the values, and put into the order of their projections (modeling_deepseek_v2.py).
    """
    latent, tokens, dtype = sizes.model.latent, sizes.tokens, sizes.stored
    assert latent is not None
    query, up = sizes.query_width, sizes.heads * (latent.nope_dim + latent.value_dim)

    def op(name: str, kind: ElementwiseKind, width: int) -> Op:
        return Op(name, elementwise(kind, tokens, width, 1, 1, dtype))

    return (
        (op("join queries", K.JOIN, query), op("keys", K.BROADCAST, query)),
        (
            op("keys gradient copy", K.COPY, 2 * query),
            op("keys gradient", K.BROADCAST, query),
            op("join kv gradients", K.JOIN, up),
            op("swap kv gradients", K.BROADCAST, up),
            op("join query gradients", K.JOIN, query),
            op("swap query gradients", K.BROADCAST, query),
        ),
    )
