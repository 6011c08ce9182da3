"""Emulate a GPU on tensors without data: their device, mixed precision, and operators that a GPU runs as one kernel.

On meta tensors PyTorch would choose the kernels of a CPU, or decompose an operator into many. On a GPU attention is
one kernel that saves queries, keys, values, its result and a number for each row (the logarithm of its sum);
RMSNorm is one kernel forward and one operator backward (ATen/native/cuda/layer_norm_kernel.cu); LSTM, GRU and RNN
are one call of cuDNN in each direction (ATen/native/cudnn/RNN.cpp).

So is the host: its time outside of operators, in checkpoints that it enters and runs again and in copies to and from
the GPU, is counted in additions (data/fits/captured.toml); the next operator is launched after them.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from stepcast.hardware.catalog import load_fit
from stepcast.ir.tables import constants

TorchCall: TypeAlias = Any
"""A function or an operator of PyTorch, as its modes are given it."""
Args: TypeAlias = tuple[Any, ...]
Kwargs: TypeAlias = dict[str, Any]
Context: TypeAlias = Any
"""Where the forward of an autograd function leaves what its backward needs."""

F, T = torch.nn.functional, Tensor
Tensors = list[Tensor]
META = torch.device("meta")
VALUES = "_stepcast_values"  # attribute of a tensor whose values are known
# The most elements of a tensor whose values are computed: a batch of token ids; the experts that a router chose.
KNOWN_ELEMENTS, KNOWN_CHOICES = 2**20, 2**24
GPU = "cuda"
# Attributes of a tensor without data that is in the memory of the host, and of one in memory that the GPU can read.
HOST, PINNED = "_stepcast_host", "_stepcast_pinned"
ATTENTION, DROPOUT = F.scaled_dot_product_attention, F.dropout


def _find_functions(names: str) -> frozenset[object]:
    """Return the functions of PyTorch that have one of *names*."""
    spaces = (torch, T, F, torch.linalg)
    return frozenset(getattr(space, name) for space in spaces for name in names.split() if hasattr(space, name))


FIT, MEASURED = load_fit("captured"), constants("captured")
CALLS, STAGED_BYTES = FIT["calls"], MEASURED["staged_bytes"]  # the host's time of calls, in launches
CELLS = FIT["cells"]  # gates, and the elements that cuDNN saves for each element of a result
RUN_IN_BF16, RUN_IN_FP32 = map(_find_functions, FIT["autocast"].values())
if "AutocastCUDA: registered" not in torch._C._dispatch_dump_table("aten::rms_norm"):  # PyTorch 2.11
    RUN_IN_FP32 -= {F.rms_norm, torch.rms_norm}
SOFTMAXES = {
    **dict.fromkeys((torch.softmax, T.softmax, F.softmax), "_softmax"),
    **dict.fromkeys((F.log_softmax, torch.log_softmax, T.log_softmax, F.cross_entropy), "_log_softmax"),
}


class RecurrentSizes(NamedTuple):
    """The sizes of a recurrent network, in the order of the operator's list of integers."""

    gates: int
    saved: int  # elements for each element of a layer's result
    steps: int
    batch: int
    inputs: int
    hidden: int
    layers: int
    directions: int
    projected: int  # width of a cell's projected result; 0 without a projection

    @property
    def width(self) -> int:
        """Return the width of a layer's result in one direction."""
        return self.projected or self.hidden


def _attention(query: Tensor, key: Tensor, value: Tensor, *options: object) -> tuple[Tensor, Tensor]:
    # The result has the memory layout of the queries (ATen/native/cudnn/MHA.cpp); that of the kernel for fp32 has the
    # heads of a token together, and sums in multiples of 32 tokens (transformers/cuda/attention.cu).
    shape = (*query.shape[:3], value.shape[-1])
    order, length = sorted(range(4), key=lambda axis: (-query.stride(axis), axis)), shape[2]
    if query.dtype == torch.float32:
        order, length = [0, 2, 1, 3], -(-length // 32) * 32
    out = torch.empty_permuted(shape, order, dtype=query.dtype, device=query.device)
    return out, query.new_empty((*shape[:2], length), dtype=torch.float32)


def _attention_backward(grad: Tensor, *saved: Tensor) -> Tensors:
    """Return the gradients of queries, keys and values, and the sums of the kernel for fp32: gradients of queries in
    tiles of 64 tokens (128 for wide heads) by 64, with 16 bytes of locks each (mem_eff_attention/kernel_backward.h).
    """
    query, value = saved[0], saved[2]
    if query.dtype != torch.float32:
        return [*map(torch.empty_like, saved[:3])]
    (batch, heads, length, width), rows = query.shape, 128 if max(query.shape[-1], value.shape[-1]) > 64 else 64
    sums = query.new_empty(batch * heads * -(-length // rows) * -(-width // 64) * (64 * rows + 4))
    return [*(torch.empty_permuted(t.shape, (0, 2, 1, 3), dtype=t.dtype, device=t.device) for t in saved[:3]), sums]


def _rms_norm(data: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    rows = data.shape[:-1] if weight is None else data.shape[: data.dim() - weight.dim()]
    return torch.empty_like(data), data.new_empty(rows, dtype=torch.float32)


def _rms_norm_backward(grad: Tensor, data: Tensor, sums: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    return torch.empty_like(data), data.new_empty(0) if weight is None else torch.empty_like(weight)


def _recurrent(data: Tensor, states: Tensors, weights: Tensors, numbers: Sequence[int]) -> Tensors:
    sizes, rows = RecurrentSizes(*numbers), math.prod(data.shape[:-1])
    out = data.new_empty((*data.shape[:-1], sizes.directions * sizes.width))
    reserve = (sizes.saved * sizes.layers * sizes.hidden - sizes.width) * sizes.directions * rows
    return [out, data.new_empty(max(0, reserve)), *map(torch.empty_like, states)]


def _recurrent_backward(
    grad: Tensor, data: Tensor, out: Tensor, reserve: Tensor, states: Tensors, weights: Tensors, numbers: Sequence[int]
) -> Tensors:
    sizes, rows = RecurrentSizes(*numbers), math.prod(data.shape[:-1])
    scratch = data.new_empty(MEASURED["gate_gradients"] * sizes.gates * sizes.hidden * sizes.directions * rows)
    return [torch.empty_like(data), scratch, *map(torch.empty_like, (*states, *weights))]


def _gru_cell(inputs: Tensor, states: Tensor, hidden: Tensor, *biases: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(hidden), hidden.new_empty(hidden.shape[0], 5 * hidden.shape[1])


def _gru_cell_backward(grad: Tensor, saved: Tensor, has_bias: bool) -> tuple[Tensor | None, ...]:
    gates = grad.new_empty(grad.shape[0], 3 * grad.shape[1])
    biases = [gates.new_empty(gates.shape[1]) if has_bias else None for _ in range(2)]
    return gates, torch.empty_like(gates), torch.empty_like(grad), *biases


def _ctc_loss(chances: Tensor, targets: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    steps, batch = chances.shape[0], chances.shape[1] if chances.dim() > 2 else 1
    words = targets.shape[-1] if targets.dim() > 1 else -(-targets.shape[0] // batch)
    return chances.new_empty(batch), chances.new_empty(batch, steps, 2 * words + 1)


OPERATORS = {
    "attention(Tensor query, Tensor key, Tensor value, Tensor? mask, bool causal, bool drops) -> (Tensor, Tensor)":
        _attention,
    "attention_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor out, Tensor sums, "
    "bool causal, bool drops) -> Tensor[]": _attention_backward,
    **{f"{name}(Tensor input, int dim) -> Tensor": lambda data, dim: torch.empty_like(data, dtype=torch.float32)
       for name in ("_softmax", "_log_softmax")},
    **{f"{name}_backward_data(Tensor grad, Tensor out, ScalarType dtype) -> Tensor":
       lambda grad, out, dtype: torch.empty_like(out, dtype=dtype) for name in ("_softmax", "_log_softmax")},
    "rms_norm(Tensor input, Tensor? weight) -> (Tensor, Tensor)": _rms_norm,
    "rms_norm_backward(Tensor grad, Tensor input, Tensor sums, Tensor? weight) -> (Tensor, Tensor)":
        _rms_norm_backward,
    "recurrent(Tensor input, Tensor[] states, Tensor[] weights, int[] sizes) -> Tensor[]": _recurrent,
    "recurrent_backward(Tensor grad, Tensor input, Tensor out, Tensor reserve, Tensor[] states, Tensor[] weights, "
    "int[] sizes) -> Tensor[]": _recurrent_backward,
}  # fmt: skip

# Operators of PyTorch that have no implementation on tensors without data.
MISSING = {
    "_thnn_fused_gru_cell": _gru_cell,
    "_thnn_fused_gru_cell_backward": _gru_cell_backward,
    **dict.fromkeys(("_ctc_loss", "_ctc_loss.Tensor"), _ctc_loss),
    **dict.fromkeys(("_ctc_loss_backward", "_ctc_loss_backward.Tensor"), lambda _, chances, *rest: chances.clone()),
}


@lru_cache(maxsize=1)
def define_operators() -> object:
    """Define the operators once; they last as long as the libraries that are returned."""
    own, missing = torch.library.Library("stepcast", "DEF"), torch.library.Library("aten", "IMPL", "Meta")
    for schema, implementation in OPERATORS.items():
        own.define(schema)
        own.impl(schema.partition("(")[0], implementation, "Meta")
    for name, implementation in MISSING.items():
        missing.impl(name, implementation)
    return own, missing


class _Attention(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(context: Context, *inputs: object) -> Tensor:
        out, sums = torch.ops.stepcast.attention(*inputs)
        context.save_for_backward(*inputs[:4], out, sums)
        context.options = inputs[4:]
        context.set_materialize_grads(False)
        return out

    @staticmethod
    def backward(context: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        if grad.dtype == torch.float32:  # the gradient in the layout of the result, and its product with it by token
            grad = grad.transpose(1, 2).contiguous().transpose(1, 2)
            (grad * context.saved_tensors[4]).sum(-1)
        gradients = torch.ops.stepcast.attention_backward(grad, *context.saved_tensors, *context.options)
        return (*gradients[:3], None, None, None)


class _RmsNorm(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(context: Context, data: Tensor, weight: Tensor | None) -> Tensor:
        out, sums = torch.ops.stepcast.rms_norm(data, weight)
        context.save_for_backward(data, sums, weight)
        return out

    @staticmethod
    def backward(context: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        data, sums, weight = context.saved_tensors
        of_data, of_weight = torch.ops.stepcast.rms_norm_backward(grad, data, sums, weight)
        return of_data, None if weight is None else of_weight


class _HalfSoftmax(torch.autograd.Function):  # type: ignore[misc]
    """A softmax or its logarithm in fp32 of narrower data, without a copy of them (SoftMax.cpp, half_to_float)."""

    @staticmethod
    def forward(context: Context, name: str, data: Tensor, dim: int) -> Tensor:
        out = getattr(torch.ops.stepcast, name)(data, dim)
        context.name, context.dtype = name, data.dtype
        context.save_for_backward(out)
        return out

    @staticmethod
    def backward(context: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        gradient = getattr(torch.ops.stepcast, f"{context.name}_backward_data")
        return None, gradient(grad, *context.saved_tensors, context.dtype), None


class _RecurrentNet(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        context: Context, sizes: RecurrentSizes, state_count: int, data: Tensor, *rest: Tensor
    ) -> tuple[Tensor, ...]:
        states, weights = list(rest[:state_count]), list(rest[state_count:])
        out, reserve, *new_states = torch.ops.stepcast.recurrent(data, states, weights, list(sizes))
        context.sizes, context.state_count = sizes, state_count
        context.save_for_backward(data, out, reserve, *states, *weights)
        context.set_materialize_grads(False)
        return (out, *new_states)

    @staticmethod
    def backward(context: Context, grad: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        data, out, reserve, *rest = context.saved_tensors
        states, weights = rest[: context.state_count], rest[context.state_count :]
        grad = torch.zeros_like(out) if grad is None else grad
        of_data, scratch, *others = torch.ops.stepcast.recurrent_backward(
            grad, data, out, reserve, states, weights, list(context.sizes)
        )
        del scratch
        return (None, None, of_data, *others)


def rms_norm(input: Tensor, normalized_shape: object, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """Run ``torch.nn.functional.rms_norm`` as a GPU does; the work does not depend on *eps*.

    There is no kernel for operands of several formats (aten/src/ATen/native/layer_norm.cpp, rms_norm_composite).
    """
    if weight is None or weight.dtype is input.dtype:
        return _RmsNorm.apply(input, weight)
    wide = input.float()
    scales = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True).add_(eps or 0.0))
    return wide.mul(scales).mul(weight).type_as(input)


def run_half_softmax(
    func: Callable[..., Tensor], data: Tensor, *args: Any, dim: int | None = None, **kwargs: Any
) -> Tensor | None:
    """Run a softmax of narrow data, which autocast computes in fp32, or a cross entropy, whose logarithms stay narrow
    and are cast for the loss (aten/src/ATen/native/LossNLL.cpp, cross_entropy_loss); None where it needs a copy.
    """
    if func is not F.cross_entropy:
        axis = dim if dim is not None else args[0] if args else None
        return None if axis is None or kwargs.get("dtype") else _HalfSoftmax.apply(SOFTMAXES[func], data, axis)
    target = args[0] if args else kwargs.pop("target", None)
    if len(args) > 1 or target is None or target.is_floating_point() or kwargs.get("label_smoothing"):
        return None
    kwargs = {name: value for name, value in kwargs.items() if name != "label_smoothing"}
    return F.nll_loss(torch.log_softmax(data, 1 if data.dim() > 1 else 0).float(), target, **kwargs)


def run_recurrent_net(name: str, *args: Any) -> tuple[Tensor, ...]:
    """Run ``torch.lstm`` and the like (*name*) as cuDNN does.

    Sequences are padded: packed ones have lengths, which are values of a tensor.
    """
    gates, saved = CELLS[name]
    data, states, weights, _, layers, _, _, both, batch_first = args
    steps, batch = (data.shape[1], data.shape[0]) if batch_first else (data.shape[0], data.shape[1])
    states = list(states) if isinstance(states, list | tuple) else [states]
    hidden = weights[0].shape[0] // gates
    projected = states[0].shape[-1] if states[0].shape[-1] != hidden else 0
    sizes = RecurrentSizes(gates, saved, steps, batch, data.shape[-1], hidden, layers, 2 if both else 1, projected)
    results: tuple[Tensor, ...] = _RecurrentNet.apply(sizes, len(states), data, *states, *weights)
    return results


def run_cell(func: object, data: Tensor, state: Tensor | Tensors, *weights: Tensor) -> Tensor | Tensors:
    """Run ``torch.lstm_cell`` or ``torch.gru_cell``: two products and one kernel (ATen/native/RNN.cpp)."""
    of_data, of_state, *biases = (*weights, None, None)[:4]
    hidden, fused = state, torch.ops.aten._thnn_fused_gru_cell
    if func is torch.lstm_cell:
        (hidden, state), fused = state, torch.ops.aten._thnn_fused_lstm_cell
    result = fused(torch.matmul(data, of_data.t()), torch.matmul(hidden, of_state.t()), state, *biases)
    return result[:2] if func is torch.lstm_cell else result[0]


def fused_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Run ``scaled_dot_product_attention`` as the kernel that a GPU would choose."""
    if query.dim() != 4:
        four = [t.reshape(1, math.prod(t.shape[:-2]), *t.shape[-2:]) for t in (query, key, value)]
        mask = None if attn_mask is None else attn_mask.reshape(1, -1, *attn_mask.shape[-2:])
        out = fused_attention(four[0], four[1], four[2], mask, dropout_p, is_causal, scale, enable_gqa)
        return out.reshape(*query.shape[:-2], *out.shape[-2:])
    shares_keys = query.shape[1] != key.shape[1]
    takes_shared_keys = enable_gqa and query.dtype in (torch.bfloat16, torch.float16)
    learns_mask = attn_mask is not None and attn_mask.requires_grad
    if not learns_mask and (takes_shared_keys or not shares_keys):
        return _Attention.apply(query, key, value, attn_mask, is_causal, dropout_p > 0)
    # Flash attention and cuDNN only take half precision, and shared keys only with enable_gqa; the other fused kernel
    # takes as many keys as queries (ATen/native/transformers/cuda/sdp_utils.cpp). A learnt mask, such as the
    # positions of T5, has a gradient in neither. What is left runs in fp32, operator by operator, with the dropout of
    # a GPU (ATen's _scaled_dot_product_attention_math).
    wide = [tensor.float() for tensor in (query, key, value)]
    half = math.sqrt(scale if scale is not None else query.shape[-1] ** -0.5)
    if is_causal:
        causal = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
        attn_mask = torch.where(causal, 0.0, float("-inf")).to(torch.float32)
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1 and key.shape[1] > 1:
        wide[1:] = [tensor.repeat_interleave(repeats, 1) for tensor in wide[1:]]
    scores = torch.matmul(wide[0] * half, wide[1].transpose(-2, -1) * half)
    if attn_mask is not None:
        scores.add_(attn_mask)
    shares = torch.ops.aten._safe_softmax(scores, -1)
    if dropout_p:
        shares = torch.native_dropout(shares, dropout_p, True)[0]
    return torch.matmul(shares, wide[2]).to(query.dtype)


def run_dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Run dropout as a GPU does: one kernel, which saves a mask of bytes."""
    return torch.native_dropout(input, p, True)[0] if training and p != 0.0 else input


def grouped_mm(
    left: Tensor, right: Tensor, offs: Tensor | None = None, bias: object = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Multiply the rows of each expert by its weight or, for two matrices, compute each expert's weight gradient."""
    groups = (left.shape[0],) if left.dim() == 3 else ()
    if offs is not None and left.dim() == right.dim() == 2:
        groups = (offs.shape[0],)
    return left.new_empty((*groups, left.shape[-2], right.shape[-1]), dtype=out_dtype or left.dtype)


def safe_softmax(scores: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return the softmax, with zeros for fully masked rows (aten/src/ATen/native/SoftMax.cpp, safe_softmax)."""
    shares = torch.softmax(scores, dim, dtype)
    empty = (scores == float("-inf")).all(dim, keepdim=True)
    return torch.where(empty, torch.zeros((), dtype=shares.dtype, device=META), shares)


class CumulativeProduct(torch.autograd.Function):  # type: ignore[misc]
    """A cumulative product whose gradient is that of numbers without zeros, which PyTorch looks for on a GPU.

    Under a mode it runs a loop over the columns instead (torch/csrc/autograd/FunctionsManual.cpp, cumprod_backward).
    """

    @staticmethod
    def forward(context: Context, input: Tensor, dim: int) -> Tensor:
        result = torch.cumprod(input, dim)
        context.save_for_backward(input, result)
        context.dim = dim
        return result

    @staticmethod
    def backward(context: Context, gradient: Tensor) -> tuple[Tensor, None]:
        input, result = context.saved_tensors
        (input == 0).any()
        sums = (gradient * result).flip(context.dim).cumsum(context.dim).flip(context.dim)
        return sums / input, None


# Functions of PyTorch that a GPU runs as other operators.
REPLACED: dict[object, Callable[..., object]] = {
    DROPOUT: run_dropout,
    **dict.fromkeys((F.rms_norm, torch.rms_norm), rms_norm),
    **{getattr(torch, name): partial(run_recurrent_net, name) for name in CELLS},
    **{cell: partial(run_cell, cell) for cell in (torch.lstm_cell, torch.gru_cell)},
    **dict.fromkeys((torch.cumprod, T.cumprod), lambda input, dim: CumulativeProduct.apply(input, dim)),
}


class EmulatedGpu(TorchFunctionMode):  # type: ignore[misc]
    """Places all tensors of a program on the meta device and runs a GPU's operators.

    Attention and dropout are also called inside functions of PyTorch, where a mode does not see them: they are
    replaced.
    """

    def __init__(self) -> None:
        super().__init__()
        # Of weights and of masks, in this forward.
        self._casts: dict[int, tuple[Tensor, Tensor]] = {}
        self._masks: dict[int, tuple[Tensor, Tensor]] = {}

    def forget_casts(self) -> None:
        """Free what the forward cast once for all its readers."""
        self._casts.clear()
        self._masks.clear()

    def __enter__(self) -> object:
        define_operators()
        F.scaled_dot_product_attention, F.dropout = self._attend, run_dropout
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        F.scaled_dot_product_attention, F.dropout = ATTENTION, DROPOUT

    def _cast_for(self, func: Callable[..., object], values: Any) -> Any:
        """Return the arguments *values* of *func* in the format in which ``torch.autocast("cuda")`` runs it."""
        if not torch.is_autocast_enabled(GPU) or not (func in RUN_IN_BF16 or func in RUN_IN_FP32):
            return values
        return self._cast(values, torch.float32 if func in RUN_IN_FP32 else torch.get_autocast_dtype(GPU))

    def _cast(self, value: Any, dtype: torch.dtype) -> Any:
        """Return *value* with its floats as *dtype*; a weight is cast once in a forward (autocast_mode.cpp)."""
        if isinstance(value, Tensor):
            if not value.is_floating_point() or value.dtype in (dtype, torch.float64):
                return value
            is_weight = value.is_leaf and value.requires_grad and dtype is not torch.float32
            if not is_weight or torch._C._current_autograd_node() is not None:
                return value.to(dtype)
            if id(value) not in self._casts:
                self._casts[id(value)] = (value, value.to(dtype))
            return self._casts[id(value)][1]
        if isinstance(value, tuple | list):
            # Arguments that are one tensor stay one: attention asks whether its queries are its keys.
            casts = {id(item): self._cast(item, dtype) for item in value}
            return type(value)(casts[id(item)] for item in value)
        return {key: self._cast(item, dtype) for key, item in value.items()} if isinstance(value, dict) else value

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> Tensor:
        query, key, value = self._cast_for(torch.matmul, (query, key, value))
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = self._additive_mask(attn_mask, query.dtype)
        return fused_attention(query, key, value, attn_mask, *args, **kwargs)

    def _additive_mask(self, mask: Tensor, dtype: torch.dtype) -> Tensor:
        """Return *mask* as numbers to add: eager code converts it in every call (attention.cpp), compiled code once."""
        masks = self._masks if torch.compiler._is_compiling_flag else {}
        if id(mask) not in masks:
            masks[id(mask)] = (mask, torch.where(mask, 0.0, float("-inf")).to(dtype))
        return masks[id(mask)][1]

    def __torch_function__(
        self, func: TorchCall, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        if torch.is_autocast_enabled(GPU) and func in SOFTMAXES and args[0].dtype in (torch.bfloat16, torch.float16):
            result = run_half_softmax(func, *args, **(kwargs or {}))
            if result is not None:
                return result
        args, kwargs = self._cast_for(func, (args, kwargs or {}))
        if func is ATTENTION:
            return self._attend(*args, **kwargs)
        run = REPLACED.get(func)
        return self.place(func, args, kwargs) if run is None else run(*args, **kwargs)

    def place(self, func: TorchCall, args: Args, kwargs: Kwargs) -> object:
        """Run *func* with all of its tensors on the meta device."""
        if func is torch.tensor or func is torch.as_tensor:  # on a GPU a copy that the host waits for
            real = func(*args, **{**kwargs, "device": "cpu"})
            if real.device.type != "cpu":
                return real
            if kwargs.get("device") is not None and torch.device(kwargs["device"]).type != "cpu":
                return real.to(META)
            with torch._C._DisableTorchDispatch():  # on the host no operator
                return with_known_values(real)
        if func is T.cuda or func is T.cpu:
            return args[0]
        if func is T.to:
            args = tuple(META if _names_device(value) else value for value in args)
        if "device" in kwargs or func in _device_constructors():
            kwargs = {**kwargs, "device": META}
        return func(*args, **kwargs)


def _names_device(value: object) -> bool:
    devices = ("cuda", "cpu", "meta")
    return isinstance(value, torch.device) or (isinstance(value, str) and value.split(":")[0] in devices)


def with_known_values(real: Tensor) -> Tensor:
    """Return *real* on the meta device, with its values attached."""
    tensor = real.to(META)
    setattr(tensor, VALUES, real)
    return tensor


def move_to_meta(tensor: Tensor) -> Tensor:
    """Return a tensor of the host on the meta device; integers keep their values."""
    if tensor.device.type != "cpu":
        return tensor
    return tensor.to(META) if tensor.is_floating_point() else with_known_values(tensor)


def expand_masks(args: Args) -> Args:
    """Return the arguments of an indexed operator with the places that its masks select, where these are known."""
    places: list[Tensor | None] = []
    for index in args[1]:
        known = getattr(index, VALUES, None) if index is not None and index.dtype is torch.bool else None
        places += [index] if known is None else [place.to(META) for place in known.nonzero(as_tuple=True)]
    return (args[0], places, *args[2:])


def may_be_known(tensor: Tensor) -> bool:
    return bool(tensor.numel() <= (KNOWN_CHOICES if tensor.dtype in (torch.int64, torch.bool) else KNOWN_ELEMENTS))


def choose_evenly(indices: Tensor, count: int) -> None:
    """Set the choices of a router whose scores are unknown: each row takes the next of *count* experts.

    All experts are chosen equally often, and none twice by a row.
    """
    if count and indices.dtype is torch.int64 and may_be_known(indices):
        chosen = torch.arange(indices.numel(), device="cpu").remainder(count).reshape(indices.shape)
        setattr(indices, VALUES, chosen)


_spent, _called = [0.0], list[str]()


def spend(calls: float) -> None:
    """Keep the host busy before the next operator for so many additions."""
    _spent[0] += calls


def call(kind: str) -> None:
    """Note that the host runs code of Python around operators: a module, or a function with a gradient of its own."""
    _called.append(kind)


def take_host_work() -> tuple[float, tuple[str, ...]]:
    """Return what the host spent, in additions, and what it called since it was last asked, and begin anew."""
    work = _spent[0], tuple(_called)
    _spent[0] = 0.0
    _called.clear()
    return work


def is_on_host(tensor: Tensor) -> bool:
    return bool(tensor.device.type == "cpu") or hasattr(tensor, HOST)


def begin_copy(source: Tensor, size_bytes: int) -> tuple[str, bool]:
    """Return the operator of a copy to the GPU, and whether the CPU waits for the GPU before it.

    The GPU reads pinned memory itself. The CPU stages other memory in parts, and waits before it stages many.
    """
    if hasattr(source, PINNED):
        return "host_copy", False
    spend(CALLS["staged"] * size_bytes)
    return "_to_copy", size_bytes > STAGED_BYTES


def fetch(size_bytes: int) -> None:
    """Copy a result to new memory of the host."""
    spend(CALLS["fetched"] * size_bytes if size_bytes > STAGED_BYTES else 0.0)
